"""Without librdmacm: the package imports, and who wants a connection over it is told what is missing."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

PROGRAM = """
    import aiordma
    from aiordma import _cm

    print(aiordma.connect.__name__)
    for use in (_cm.load, _cm.EventChannel):
        try:
            use()
        except aiordma.UnsupportedError as e:
            print(e)
"""


def test_without_librdmacm_the_package_imports_and_the_first_use_is_an_unsupported_error(
    run_python: Callable[..., "CompletedProcess[str]"], tmp_path: Path
) -> None:
    # What the loader finds first isn't a library. (pyverbs doesn't load then either, so no device is opened here.)
    (tmp_path / "librdmacm.so.1").write_bytes(b"no library at all, but long enough to be looked at" * 20)
    lines = run_python(PROGRAM, LD_LIBRARY_PATH=str(tmp_path)).stdout.splitlines()
    assert lines[0] == "connect"
    assert len(lines) == 3
    for line in lines[1:]:
        assert line.startswith("this system does not support rdma_cm: ")
        assert "librdmacm.so.1" in line
