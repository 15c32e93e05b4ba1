"""Where the emulator's shared library is."""

import importlib.resources
import os
from pathlib import Path

LIBRARY_NAME = "libaiordma_emulator.so"
OVERRIDE_VARIABLE = "AIORDMA_EMULATOR_LIBRARY"


def library_path() -> Path:
    """Return the absolute path of the emulator's shared library, for ``LD_PRELOAD`` or :class:`ctypes.CDLL`.

    The environment variable ``AIORDMA_EMULATOR_LIBRARY`` names another build of it: one with sanitizers, say.

    :raises FileNotFoundError: the library isn't there: the package is being imported from its source tree, or
        the environment variable names no file
    """
    override = os.environ.get(OVERRIDE_VARIABLE)
    if override:
        path = Path(override).absolute()
        if not path.is_file():
            raise FileNotFoundError(f"{OVERRIDE_VARIABLE} names {path}, which is no file")
        return path

    # An installed package has the library beside this module. In an editable install it is in the build
    # directory, which only the import system knows: the resource then is a real file elsewhere.
    resource = importlib.resources.files(__package__) / LIBRARY_NAME
    if isinstance(resource, Path) and resource.is_file():
        return resource.absolute()
    raise FileNotFoundError(
        f"{LIBRARY_NAME} is not in the package. Where aiordma is imported from its source tree, which has no "
        "compiled parts: run `make build` and use .venv/bin/python from another folder, or `make develop`."
    )
