"""Options of the conformance tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tox environment `conformance` run everything."""
    parser.addoption(
        "--all-modules",
        action="store_true",
        help="run also those modules of rdma-core's tests in which nothing passes on the emulated NIC",
    )
