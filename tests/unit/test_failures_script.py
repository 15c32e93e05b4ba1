"""scripts/failures.py, with which make test ends when something has failed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "failures.py"


def command(retcode: int, output: str = "", err: str = "") -> dict[str, Any]:
    return {"command": ["run", "it"], "retcode": retcode, "output": output, "err": err}


def told(results: Path, environments: dict[str, Any], *arguments: str) -> bytes:
    results.write_text(json.dumps({"testenvs": environments}))
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, SCRIPT, results, *arguments], env=strict, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def test_failed_commands_are_told_with_the_end_of_their_output(tmp_path: Path) -> None:
    failed = {"setup": [command(0, "installed\n")], "test": [command(0, "fine\n"), command(3, "one\ntwo\nthree\n")]}
    said = told(tmp_path / "tox.json", {"lint": failed, "types": {"test": [command(0, "fine\n")]}}, "2")
    assert said == b"\n==== lint: run it failed (3); it ended with\ntwo\nthree\n"


def test_output_that_is_no_utf8_is_told_as_it_was(tmp_path: Path) -> None:
    """tox keeps such bytes as lone surrogates, which no stream encodes."""
    odd = b"odd \xff\xfe \xe2\x82\xac\n"
    broken = {"test": [command(1, odd.decode("utf-8", "surrogateescape"))]}
    said = told(tmp_path / "tox.json", {"a": broken, "b": {"test": [command(1, "plain\n")]}})
    assert odd in said
    assert said.endswith(b"\nplain\n")


def test_an_environment_that_could_not_be_made_is_told(tmp_path: Path) -> None:
    unmade = {"result": {"success": False}, "setup": [command(1, err="no such package\n")]}
    assert b"no such package" in told(tmp_path / "tox.json", {"docs": unmade})


def test_what_may_fail_is_not_told(tmp_path: Path) -> None:
    allowed = {"result": {"success": True}, "test": [command(5, "ignored\n"), command(0)]}
    assert told(tmp_path / "tox.json", {"rxe": allowed}) == b""


def test_without_results_there_is_nothing_to_tell(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "none.json"], capture_output=True, check=True)
    assert done.stdout == b""
