"""The VM of tests/rxe/vm ends by its time limit, whatever happens in it, and says how.

The machine here is a shell script with a machine's ports: a VM that hangs on purpose takes minutes.
"""

import os
import time
from pathlib import Path

import pytest
from rxe.vm import machine


def run(work: Path, script: str, limit: float) -> tuple[machine.Result, bytes]:
    shown: list[bytes] = []
    result = machine.run(["sh", "-c", script, "machine", str(work)], work, limit, shown.append)
    return result, b"".join(shown)


def test_output_and_exit_status_of_the_command_come_out(tmp_path: Path) -> None:
    result, shown = run(tmp_path, "echo one; echo 3 >$1/status; echo two", 60)
    assert (result.status, shown) == (3, b"one\ntwo\n")


def test_a_machine_that_ends_without_a_status_is_reported_with_its_console(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "echo Kernel panic - not syncing >$1/console.log", 60)
    assert result.status is None
    assert "panic" in result.why
    assert result.console == "Kernel panic - not syncing\n"


def test_half_a_status_is_none(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "printf 1 >$1/status", 60)
    assert result.status is None


def test_a_machine_that_hangs_is_killed_at_its_limit(tmp_path: Path) -> None:
    begun = time.monotonic()
    result, shown = run(tmp_path, "echo $$; exec sleep 600", 2)
    assert result.status is None
    assert "hangs" in result.why
    assert time.monotonic() - begun < 300
    assert not Path(f"/proc/{int(shown)}").exists()


def test_a_machine_that_stays_on_is_killed_and_its_status_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_PARTING", 1)
    result, _ = run(tmp_path, "echo 0 >$1/status; exec sleep 600", 500)
    assert result.status == 0


def test_a_status_of_an_earlier_run_doesnt_count(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("0\n")
    result, _ = run(tmp_path, ":", 60)
    assert result.status is None
    assert os.listdir(tmp_path) == []
