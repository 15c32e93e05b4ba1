#!/usr/bin/env python3
"""List what is in a package's folder but isn't to be installed: one path a line, folders with a "/".

meson.build turns the list into install_subdir's exclusions, which take exact names only.
"""

import os
import sys
from pathlib import Path

INSTALLED_SUFFIXES = {".py", ".pyi", ".pxd"}
INSTALLED_NAMES = {"py.typed"}
SKIPPED_DIRECTORIES = {"src", "__pycache__"}


def main() -> None:
    package = Path(sys.argv[1])
    for folder, directories, files in os.walk(package):
        here = Path(folder).relative_to(package)
        for name in [d for d in directories if d in SKIPPED_DIRECTORIES or d.startswith(".")]:
            directories.remove(name)
            print(f"{here / name}/")
        for name in files:
            if Path(name).suffix not in INSTALLED_SUFFIXES and name not in INSTALLED_NAMES:
                print(here / name)


if __name__ == "__main__":
    main()
