"""What all tests share."""

import importlib.machinery
import importlib.util
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

# A Python that a test starts in the repository would import the package from its source tree, which has no
# compiled parts. With this set, `python -c` and `python -m` leave the working directory out of sys.path.
os.environ.setdefault("PYTHONSAFEPATH", "1")

# A shell without job control starts what it puts in the background with SIGINT ignored, and so would every program be that
# a test starts: those that try an interrupt would try nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _import_is_from_source_tree() -> bool:
    spec = importlib.util.find_spec("aiordma")
    if spec is None:
        return False
    in_tree = spec.origin == str(Path(__file__).parents[1] / "aiordma" / "__init__.py")
    # An editable install has a loader of its own, which finds the compiled parts. pytest's own, which rewrites the asserts of
    # packages with a plugin in them, doesn't.
    return in_tree and type(spec.loader) in (importlib.machinery.SourceFileLoader, AssertionRewritingHook)


if _import_is_from_source_tree():
    raise pytest.UsageError(
        "the tests need the built package: run `make build`, then .venv/bin/pytest. (`python -m pytest` won't do: "
        "it puts the working directory on sys.path, and so finds the sources, which have no compiled parts.)"
    )

# How long an example takes, to be made or to be tried, says more about the machine's load than about the code, and
# pytest-timeout is there anyway.
TIMELESS: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("aiordma", **TIMELESS)
hypothesis.settings.register_profile("aiordma-ci", hypothesis.settings.get_profile("ci"), **TIMELESS)
hypothesis.settings.load_profile("aiordma-ci" if os.environ.get("CI") else "aiordma")

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-loop", action="store_true", help="run each async test under one of the event loops only, in turns"
    )
    parser.addoption(
        "--hardware",
        action="store_true",
        help="refuse to run on another device than a real one that AIORDMA_DEVICE names",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to begin on a device that isn't there: each test would say so in its own way."""
    names = [name for name in map(os.environ.get, ("AIORDMA_DEVICE", "AIORDMA_PEER_DEVICE")) if name]
    real = [name for name in names if name.partition(":")[0] != "emulated"]
    if config.getoption("--hardware") and (not names or real != names):
        raise pytest.UsageError(
            f"AIORDMA_DEVICE names the device to run on, as mlx5_0, and AIORDMA_PEER_DEVICE may name its peer; "
            f"they say {' and '.join(names) or 'nothing'}"
        )
    if not real:
        return
    import aiordma

    there = [info.name for info in aiordma.list_devices()]
    missing = [name for name in real if name not in there]
    if missing:
        raise pytest.UsageError(
            f"no RDMA device {' nor '.join(missing)} here: there is {', '.join(there) or 'none'}; `aiordma doctor` looks for "
            "what is wrong"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --one-loop, take one backend of each test: which one depends on its name alone."""
    # Tests of what is there when no device is open come before librdmacm has opened one.
    items.sort(key=lambda item: item.get_closest_marker("librdmacm") is not None)
    if not config.getoption("--one-loop"):
        return
    chosen, others = [], []
    for item in items:
        backend = getattr(item, "callspec", None) and item.callspec.params.get("anyio_backend")
        name = item.nodeid.partition("[")[0]
        turn = zlib.crc32(name.encode()) % len(BACKENDS)
        (chosen if backend is None or backend == BACKENDS[turn].values[0] else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run an async test marked ``anyio`` once under each event loop.

    `tox -e debug` runs those on asyncio and uvloop again in asyncio's debug mode.
    """
    backend: tuple[str, dict[str, Any]] = request.param
    return backend
