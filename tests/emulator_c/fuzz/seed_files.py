"""What the programs seeds_*.py have in common: where they write to."""

import pathlib
import sys

__all__ = ["write"]


def write(seeds: dict[str, bytes]) -> None:
    """Each into a file of its name, in the folder that the command line names."""
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in seeds.items():
        (folder / name).write_bytes(content)
