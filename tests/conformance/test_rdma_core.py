"""rdma-core's own tests pass on the emulated NIC as they did: ``expected/`` has what each gave, ``suite.py`` runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance import report, suite
from conformance.expectation import Run, regressions, why_skipped

SOURCE = suite.find_tests()
VERSION = suite.version() if importlib.util.find_spec("pyverbs") else ""
EXPECTED = Run.load(VERSION)

pytestmark = pytest.mark.skipif(SOURCE is None, reason=f"rdma-core's tests aren't in {suite.INSTALLED}")


def _modules() -> list[str]:
    if SOURCE is None:
        return []
    return sorted({path.name.split(".")[0] for path in SOURCE.glob("test_*.py*")})


def _something_passes(module: str) -> bool:
    return EXPECTED is None or any(o.result == suite.PASSED for o in EXPECTED.by_module().get(module, []))


@pytest.fixture(scope="session")
def unpacked() -> Iterator[Path]:
    """Unpack the tests once."""
    assert SOURCE is not None
    with suite.unpacked(SOURCE) as folder:
        yield folder


@pytest.mark.timeout(suite.MODULE_TIMEOUT * 2)
@pytest.mark.parametrize("module", _modules())
def test_module(request: pytest.FixtureRequest, unpacked: Path, module: str) -> None:
    """Run one module. Those in which nothing passes are of interest only where the expectation is."""
    if not request.config.getoption("--all-modules", default=False) and not _something_passes(module):
        pytest.skip("nothing in it passed when the expectation was written; --all-modules runs it")
    if module == "test_mlx5_devx" and not importlib.util.find_spec("scapy"):
        pytest.skip("it needs scapy, which tox installs for -e conformance")
    wrong = regressions(module, suite.run_module(unpacked, module), EXPECTED)
    assert not wrong, "\n".join(wrong)


def test_page_is_up_to_date() -> None:
    """docs/conformance.md is what the expectations say."""
    assert report.PAGE.read_text() == report.page(), "tests/conformance/report.py --page writes it"


def test_every_skip_is_explained() -> None:
    """Nobody is left with a skip and no idea of why."""
    unexplained = [
        o for run in Run.load_all() for o in run.outcomes if o.result == suite.SKIPPED and not why_skipped(o)
    ]
    assert not unexplained


def test_nothing_is_expected_to_fail() -> None:
    """An expectation has no failures in it."""
    failed = [o for run in Run.load_all() for o in run.outcomes if o.result not in (suite.PASSED, suite.SKIPPED)]
    assert not failed
