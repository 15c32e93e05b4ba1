"""The installed package is whole, and the test setup does what it says."""

import asyncio
import ctypes
import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sniffio
import uvloop

from aiordma.emulator import _library


def test_version_is_recorded() -> None:
    assert importlib.metadata.version("aiordma")


def test_the_command_says_its_version_and_that_of_rdma_core() -> None:
    """One line, without a device, and from no subcommand."""
    run = subprocess.run(
        [sys.executable, "-P", "-m", "aiordma.cli", "--version"], capture_output=True, text=True, check=True
    )
    version = importlib.metadata.version("aiordma")
    assert re.fullmatch(rf"aiordma {re.escape(version)}, rdma-core \d+\.\d+\n", run.stdout), run.stdout
    assert run.stderr == ""


def test_a_program_that_imports_the_sources_is_told_so(tmp_path: Path) -> None:
    """In a checkout's topmost folder Python finds the sources first, which have no compiled parts."""
    shutil.copytree(
        Path(__file__).parents[2] / "aiordma",
        tmp_path / "aiordma",
        ignore=lambda _, names: [name for name in names if name == "src" or name.endswith(".so")],
    )
    (tmp_path / "meson.build").touch()
    # An editable install's finder, which is no class as the interpreter's own are, would come before the path.
    program = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type)]; import aiordma"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    last = run.stderr.splitlines()[-1]
    assert re.match(r"ModuleNotFoundError: No module named 'aiordma\.\w+': this is aiordma's source tree", last), (
        run.stderr
    )
    assert "make develop" in last


def test_extension_is_compiled() -> None:
    from aiordma import _workqueue

    assert _workqueue.__file__.endswith(".so")


def test_installed_files() -> None:
    """Sources and byte code stay out, and what type checkers need is in."""
    files = importlib.metadata.files("aiordma")
    if files is None or not any(file.name == "py.typed" for file in files):
        pytest.skip("editable install")
    # pip adds byte code when it installs, which is none of the wheel's business
    names = {str(file) for file in files if "__pycache__" not in file.parts}
    assert "aiordma/py.typed" in names
    assert "aiordma/_workqueue.pyi" in names
    assert f"aiordma/emulator/{_library.LIBRARY_NAME}" in names
    suffixes = {Path(name).suffix for name in names if name.startswith("aiordma/")}
    assert suffixes <= {".py", ".pyi", ".pxd", ".so", ".typed"}


def test_emulator_library_loads() -> None:
    library = ctypes.CDLL(str(_library.library_path()))
    assert library.aiordma_emulator_interface() >= 1


def test_emulator_library_preloads() -> None:
    """A library that can't be preloaded makes the loader complain, and nothing else."""
    run = subprocess.run(
        ["/bin/true"],
        env=os.environ | {"LD_PRELOAD": str(_library.library_path())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""


def test_emulator_library_does_not_link_libibverbs() -> None:
    """It stands in for the kernel, below libibverbs, and must not bring in what it serves."""
    library = str(_library.library_path())
    code = f"import ctypes; ctypes.CDLL({library!r}); print(open('/proc/self/maps').read())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert _library.LIBRARY_NAME in run.stdout
    assert "libibverbs" not in run.stdout


def test_library_override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    monkeypatch.setenv(_library.OVERRIDE_VARIABLE, str(other))
    with pytest.raises(FileNotFoundError, match=r"names .*other.so, which is no file"):
        _library.library_path()
    other.touch()
    assert _library.library_path() == other


@pytest.mark.anyio
async def test_backend(anyio_backend: tuple[str, dict[str, bool]]) -> None:
    name, options = anyio_backend
    assert sniffio.current_async_library() == name
    if name == "asyncio":
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop) == options["use_uvloop"]


@pytest.mark.asyncio
async def test_pytest_asyncio_lives_beside_anyio() -> None:
    assert isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
