"""Run one module of rdma-core's tests: ``worker.py FOLDER MODULE LOG [TEST ...]``, under ``aiordma emulate``.

The log has a line of JSON when a test starts and one when it has ended, so that it tells about a process that died too.
Tests that are named, as ``Class.method``, are left out.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import sys
import traceback
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEVICE = "mlx5_0"


def name_of(test: unittest.TestCase) -> str:
    """Return class and method."""
    return ".".join(test.id().rsplit(".", 2)[-2:])


class Result(unittest.TestResult):
    """Writes what it's told."""

    def __init__(self, log: io.TextIOBase) -> None:
        super().__init__()
        self._log = log
        self._outcome: tuple[str, str] = ("passed", "")

    def _write(self, **line: Any) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome = ("passed", "")
        self._write(test=name_of(test), start=True)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        result, reason = self._outcome
        self._write(test=name_of(test), result=result, reason=reason)

    def _failed(self, err: Any) -> None:
        self._outcome = ("failed", "".join(traceback.format_exception(*err))[-4000:])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        if isinstance(test, unittest.TestCase):
            self._failed(err)
        else:  # a class's or the module's set-up
            self._write(error="".join(traceback.format_exception(*err)))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._failed(err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        if self._outcome[0] == "passed":
            self._outcome = ("skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        pass

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._outcome = ("failed", "unexpected success")


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Flatten a suite."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases(item)
        else:
            yield item


def load(folder: Path, module: str) -> list[unittest.TestCase]:
    """Import a module as part of the package ``tests``, whose own ``__init__`` would import all the others."""
    package = types.ModuleType("tests")
    package.__path__ = [str(folder / "tests")]
    sys.modules["tests"] = package
    # The tests take `args_parser` from the folder that their start script is in.
    sys.path.insert(0, str(folder / "tests"))
    sys.argv[1:] = ["--dev", DEVICE]
    importlib.import_module("args_parser").parser.parse_args()
    # The modules import each other in circles, which works only when entered here, as by way of test_addr.
    importlib.import_module("tests.utils")
    loaded = importlib.import_module(f"tests.{module}")
    suite = unittest.defaultTestLoader.loadTestsFromModule(loaded)
    # Classes that it imports from others are those modules' own.
    return [case for case in cases(suite) if type(case).__module__ == loaded.__name__]


def main(folder: str, module: str, log_name: str, *without: str) -> None:
    """Run it."""
    faulthandler.enable()
    with open(log_name, "a") as log:
        result = Result(log)
        try:
            tests = load(Path(folder), module)
        except unittest.SkipTest as e:
            # What unittest itself makes of a module that asks for it.
            log.write(json.dumps({"test": "(module)", "result": "skipped", "reason": str(e)}) + "\n")
            return
        except Exception:
            log.write(json.dumps({"error": traceback.format_exc()}) + "\n")
            return
        unittest.TestSuite(test for test in tests if name_of(test) not in without).run(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
