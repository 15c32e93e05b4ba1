"""Run rdma-core's tests and renew ``expected/`` and ``docs/conformance.md``: ``python tests/conformance/report.py``.

With ``--page`` only the page is written, from the expectations that are there.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance import suite
from conformance.expectation import Run, why_skipped
from conformance.suite import PASSED, SKIPPED

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

HEAD = """\
# Conformance

rdma-core has a test suite in Python, written against real devices. It's run on the emulated NIC as the distribution
installs it with pyverbs, unchanged, with that distribution's libibverbs and libmlx5.

`make test ARGS="-e conformance"` runs all of it and compares with what is listed here: a test that passed must pass. The
usual test run has the modules in which something passes.

This page is written by `tests/conformance/report.py`, which runs the modules one by one, each in a process of its own
under `aiordma emulate`, on one emulated device with every setting as it comes. "Skipped" is what the test says of itself
when it finds a feature missing; the reasons are below, with what is behind them. Two assertions about device memory in
versions before 50 are read as rdma-core corrected them later, and one test is left out, which fails where flow tables are
missing instead of skipping itself: both are in `tests/conformance/suite.py`.
"""


def system() -> str:
    """Name the distribution and the Python."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return f"{release.get('PRETTY_NAME', platform.system())}, Python {platform.python_version()}"


def run_all() -> Run:
    """Run every module of what is installed."""
    source = suite.find_tests()
    if source is None:
        raise SystemExit(f"rdma-core's tests aren't in {suite.INSTALLED}: apt install python3-pyverbs")
    outcomes = []
    with suite.unpacked(source) as folder:
        for module in suite.modules(folder):
            found = suite.run_module(folder, module)
            print(module, dict(Counter(o.result for o in found)), flush=True)
            outcomes += found
    return Run(suite.version(), system(), tuple(outcomes))


def table(run: Run) -> str:
    """Count the results of each module."""
    lines = ["| module | passed | failed | skipped |", "| --- | ---: | ---: | ---: |"]
    total: Counter[str] = Counter()
    for module, outcomes in sorted(run.by_module().items()):
        count = Counter(o.result if o.result in (PASSED, SKIPPED) else "failed" for o in outcomes)
        total += count
        lines.append(f"| {module} | {count[PASSED]} | {count['failed']} | {count[SKIPPED]} |")
    lines.append(f"| **all** | **{total[PASSED]}** | **{total['failed']}** | **{total[SKIPPED]}** |")
    return "\n".join(lines)


def reasons(run: Run) -> str:
    """List the skips by what is behind them."""
    groups: dict[str, list[str]] = {}
    for outcome in run.outcomes:
        if outcome.result == SKIPPED:
            reason = outcome.reason.replace("|", "\\|").replace("<", "\\<").rstrip(".")
            line = f"  - {outcome.module}: {outcome.test} ({reason})"
            groups.setdefault(why_skipped(outcome) or "not looked into", []).append(line)
    return "\n".join(
        f"- **{why[0].upper()}{why[1:]}** ({len(lines)})\n" + "\n".join(sorted(lines))
        for why, lines in sorted(groups.items())
    )


def page() -> str:
    """Compose the page."""
    parts = [HEAD]
    for run in Run.load_all():
        parts.append(f"## rdma-core {run.version}\n\n{run.system}.\n\n{table(run)}\n")
        parts.append(f"### Skipped with rdma-core {run.version}\n\n{reasons(run)}\n")
    return "\n".join(parts)


def main() -> None:
    """Run, unless told not to, and write."""
    if "--page" not in sys.argv[1:]:
        print(run_all().save())
    PAGE.write_text(page())
    print(PAGE)


if __name__ == "__main__":
    main()
