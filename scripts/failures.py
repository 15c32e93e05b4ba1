#!/usr/bin/env python3
"""Print again, at the end of a long run, what the commands printed that failed in it.

scripts/failures.py build/tox.json [lines]: the last `lines` (60) of each failed command of a ``tox run --result-json``.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Say nothing if nothing failed, or if tox itself ended before it wrote its results."""
    results = Path(sys.argv[1])
    lines = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    if not results.exists():
        return
    for name, env in json.loads(results.read_text())["testenvs"].items():
        for command in env.get("test", []):
            if command["retcode"] == 0:
                continue
            output = (command["output"] + command.get("err", "")).splitlines()
            print(f"\n==== {name}: {' '.join(command['command'])} failed ({command['retcode']}); it ended with")
            print("\n".join(output[-lines:]))


if __name__ == "__main__":
    main()
