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
    for name, env in json.loads(results.read_text(encoding="utf-8"))["testenvs"].items():
        if env.get("result", {}).get("success"):
            continue  # what failed there was allowed to
        # Installing what an environment needs may fail too.
        for command in env.get("setup", []) + env.get("test", []):
            # tox knows no status of what its packaging backend did: that is in what the backend answered.
            if command["retcode"] == 0 or (
                command["retcode"] is None and "Backend: Wrote response {'return':" in command["output"]
            ):
                continue
            output = (command["output"] + command.get("err", "")).splitlines()
            heading = f"\n==== {name}: {' '.join(command['command'])} failed ({command['retcode']}); it ended with"
            # The very bytes that were printed: tox keeps what is no UTF-8 in a form that print() refuses.
            text = "\n".join([heading, *output[-lines:]]) + "\n"
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    main()
