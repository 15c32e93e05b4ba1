"""What benchmarks/callgrind.py and instructions.py make of callgrind's output."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PROFILE = """# callgrind format
version: 1
desc: Timerange: Basic block 0 - 614584
desc: Trigger: Client Request: one

positions: line
events: Ir
summary: 100

ob=(1) /usr/bin/python3.11
fl=(1) ???
fn=(1) eval
0 10
+2 5
cob=(2) /somewhere/aiordma/_post.cpython-311-x86_64-linux-gnu.so
cfn=(2) post
calls=3 12
* 4000
-1 1

ob=(2)
fn=(2)
12 20
cob=(3) /x/emulator/libaiordma_emulator.so
cfn=(3) device_step
calls=1 0
0 50

ob=(3)
fn=(3)
7 30
cob=(4) /usr/lib/x86_64-linux-gnu/libc.so.6
cfn=(4) memcpy
calls=1 0
* 20

ob=(4)
fn=(4)
0 24
totals: 90
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> object:
    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        for module in ("callgrind", name):
            monkeypatch.delitem(sys.modules, module, raising=False)
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_profile_is_split_by_whose_code_it_is(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "out.1-01"
    path.write_text(PROFILE)
    profile = load("callgrind").read(path)
    assert profile.name == "one"
    # What a call cost isn't the caller's; what the C library did for the device is the device's.
    assert dict(profile.layers) == {"Python": 16, "aiordma": 20, "device": 50, "C library": 4}
    path.write_text(
        PROFILE.replace("Client Request: one", "Program termination").replace("Trigger: Program", "Program")
    )
    assert load("callgrind").read(path) is None


def test_more_than_the_slack_above_the_ceiling_is_told(load) -> None:  # type: ignore[no-untyped-def]
    instructions = load("instructions")
    ceilings = {"one": {"aiordma": 1000, "Python": 0}}
    assert instructions.exceeded({"one": {"aiordma": 1045, "Python": 15}}, ceilings) == []
    assert instructions.exceeded({"one": {"aiordma": 500, "Python": 0}}, ceilings) == []
    (told,) = instructions.exceeded({"one": {"aiordma": 1046, "Python": 0}}, ceilings)
    assert "one: aiordma takes 1,046" in told
    assert "1,000 were recorded" in told
