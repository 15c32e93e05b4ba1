"""The programs in the documentation run, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulated.core import complaints

ROOT = Path(__file__).parents[2]
MLX5 = ("docs/umr.md", "docs/memcpy.md", "docs/raw-wqe.md", "docs/dc.md")
OTHERS = ("docs/quickstart.md", "docs/service.md", "docs/devx.md", "docs/emulated-nic.md", "docs/faults.md")
PAGES = ("README.md", *OTHERS, *MLX5)

#: What must be among the output of a page's programs, in order.
OUTPUT = {
    "README.md": ["hello, RDMA"],
    "docs/quickstart.md": [
        "b'hello'",
        "True\nTrue",
        "server found b'good morning'",
        "nothing came in time, and <Completion RECV",
    ],
    "docs/service.md": ["server heard b'good morning'\nclient heard b'and good night'"],
    "docs/devx.md": ["RTS True"],
    "docs/emulated-nic.md": ["mlx5_0 (aiordma's emulated NIC)", "mlx5_0\nmlx5_1", ""],
    "docs/faults.md": ["1 of 4 requests lost, and sent again\nIBV_WC_RETRY_EXC_ERR"],
    "docs/umr.md": ["[ 3  4 11 12 19 20 27 28 35 36 43 44]"],
    "docs/memcpy.md": ["20 b'copied by the device'"],
    "docs/raw-wqe.md": ["b'by hand' RAW_WQE 136"],
    "docs/dc.md": ["7 for 0x"],
}


def programs(page: str) -> list[str]:
    """A page's blocks that are marked as Python. Fragments are marked otherwise."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


CASES = [
    pytest.param(program, expected, id=f"{page}-{number}")
    for page in PAGES
    for number, (program, expected) in enumerate(zip(programs(page), OUTPUT[page], strict=True), 1)
]


@pytest.mark.parametrize(("program", "expected"), CASES)
def test_program(program: str, expected: str, tmp_path: Path) -> None:
    environment = {**os.environ, "AIORDMA_DEVICE": "emulated", "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert complaints(done.stderr) == ""


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
