"""What all tests share."""

import os
from typing import Any

import pytest

# A Python that a test starts in the repository would import the package from its source tree, which has no
# compiled parts. With this set, `python -c` and `python -m` leave the working directory out of sys.path.
os.environ.setdefault("PYTHONSAFEPATH", "1")

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run an async test marked ``anyio`` once under each event loop.

    `tox -e debug` runs those on asyncio and uvloop again in asyncio's debug mode.
    """
    backend: tuple[str, dict[str, Any]] = request.param
    return backend
