"""The exception tree: each status has its class, says what happened, and survives pickling."""

import errno
import pickle
import re
import subprocess
from pathlib import Path

import pytest

import aiordma
from aiordma import CompletionError, RdmaError, VerbsError, errors
from aiordma.errors import completion_error

# enum ibv_wc_status of verbs.h, in order from IBV_WC_SUCCESS = 0.
STATUSES = {
    1: "LOC_LEN_ERR",
    2: "LOC_QP_OP_ERR",
    3: "LOC_EEC_OP_ERR",
    4: "LOC_PROT_ERR",
    5: "WR_FLUSH_ERR",
    6: "MW_BIND_ERR",
    7: "BAD_RESP_ERR",
    8: "LOC_ACCESS_ERR",
    9: "REM_INV_REQ_ERR",
    10: "REM_ACCESS_ERR",
    11: "REM_OP_ERR",
    12: "RETRY_EXC_ERR",
    13: "RNR_RETRY_EXC_ERR",
    14: "LOC_RDD_VIOL_ERR",
    15: "REM_INV_RD_REQ_ERR",
    16: "REM_ABORT_ERR",
    17: "INV_EECN_ERR",
    18: "INV_EEC_STATE_ERR",
    19: "FATAL_ERR",
    20: "RESP_TIMEOUT_ERR",
    21: "GENERAL_ERR",
    22: "TM_ERR",
    23: "TM_RNDV_INCOMPLETE",
}
PEER_IS_GONE = {5, 12, 13, 16, 20}


def _error(status: int) -> CompletionError:
    return completion_error(
        status=status,
        vendor_err=0x81,
        opcode="RDMA_WRITE",
        qp_num=0x1234,
        wr_id=77,
        local="local 0x1000+8 lkey 0x5",
        remote="remote 0x2000 rkey 0xabcd",
        note="A note.",
    )


@pytest.mark.parametrize(("status", "name"), STATUSES.items())
def test_each_status_has_its_class_with_all_that_is_known(status: int, name: str) -> None:
    error = _error(status)
    assert type(error) is not CompletionError
    assert error.status_name == f"IBV_WC_{name}"
    assert (error.status, error.vendor_err, error.opcode, error.qp_num, error.wr_id) == (
        status,
        0x81,
        "RDMA_WRITE",
        0x1234,
        77,
    )
    text = str(error)
    for part in (f"IBV_WC_{name}", "RDMA_WRITE", "0x1234", "0x81", "rkey 0xabcd", "lkey 0x5", error.meaning, "A note."):
        assert part in text
    assert isinstance(error, ConnectionError) == (status in PEER_IS_GONE)


@pytest.mark.parametrize("status", [*STATUSES, 24, 99])
def test_completion_errors_survive_pickling(status: int) -> None:
    error = _error(status)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.details == error.details
    assert (again.status, again.wr_id) == (status, 77)


def test_classes_of_different_statuses_differ() -> None:
    assert len({type(_error(status)) for status in STATUSES}) == len(STATUSES)


def test_a_status_of_the_future_is_still_an_error_with_its_number() -> None:
    error = _error(99)
    assert type(error) is CompletionError
    assert error.status == 99
    assert "99" in str(error)


def test_the_statuses_are_those_of_the_installed_header() -> None:
    header = Path("/usr/include/infiniband/verbs.h")
    if not header.exists():
        pytest.skip("libibverbs-dev isn't installed")
    found = re.search(r"enum ibv_wc_status \{(.*?)\}", header.read_text(), re.DOTALL)
    assert found is not None
    names = re.findall(r"IBV_WC_\w+", found[1])
    assert names[0] == "IBV_WC_SUCCESS"
    assert {number: name for number, name in enumerate(names) if number} == {
        number: f"IBV_WC_{name}" for number, name in STATUSES.items()
    }


def test_verbs_error_is_an_os_error_with_errno_and_verb() -> None:
    error = VerbsError("ibv_reg_mr", errno.ENOMEM, "4096 bytes")
    assert isinstance(error, OSError)
    assert isinstance(error, RdmaError)
    assert (error.errno, error.verb, error.detail) == (errno.ENOMEM, "ibv_reg_mr", "4096 bytes")
    assert "ibv_reg_mr" in str(error)
    assert "4096 bytes" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is VerbsError
    assert (again.errno, again.verb, again.detail, str(again)) == (error.errno, error.verb, error.detail, str(error))


def test_verbs_error_of_a_provider_that_returns_its_errno_negative() -> None:
    error = VerbsError("ibv_post_recv", -errno.EINVAL)
    assert error.errno == errno.EINVAL
    assert "Invalid argument" in str(error)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.EPIPE, errno.ETIMEDOUT, errno.EAGAIN])
def test_verbs_error_keeps_its_class_for_every_errno(code: int) -> None:
    # OSError(errno, text) itself becomes PermissionError, FileNotFoundError, ...
    assert type(VerbsError("ibv_open_device", code)) is VerbsError


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("UsageError", ValueError),
        ("BufferAccessError", TypeError),
        ("BufferAccessError", errors.UsageError),
        ("AccessFlagsError", errors.UsageError),
        ("QPStateError", errors.UsageError),
        ("WrongLoopError", RuntimeError),
        ("ForkError", RuntimeError),
        ("DeviceNotFoundError", LookupError),
        ("GidError", LookupError),
        ("ProviderError", ImportError),
        ("ExchangeError", ConnectionError),
        ("DeviceFatalError", ConnectionError),
        ("CompletionQueueError", ConnectionError),
        ("VerbsError", OSError),
        ("WrFlushError", ConnectionError),
    ],
)
def test_errors_are_kin_of_the_builtin_that_callers_expect(name: str, bases: type) -> None:
    cls = getattr(aiordma, name)
    assert issubclass(cls, bases)
    assert issubclass(cls, RdmaError)


def test_everything_raised_on_purpose_is_public_and_an_rdma_error() -> None:
    for name in errors.__all__:
        thing = getattr(errors, name)
        assert getattr(aiordma, name) is thing
        if isinstance(thing, type):
            assert issubclass(thing, RdmaError)
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RdmaError)]
    assert {c.__name__ for c in classes} <= set(errors.__all__)


@pytest.mark.parametrize(
    "error",
    [
        errors.UnsupportedError("mlx5_0", "DC transport", "firmware too old"),
        errors.UnsupportedError("mlx5_0", "DC transport"),
        errors.UnknownCompletionError(0x1_0000_0001, 0x99, 5),
        errors.UsageError("no"),
        errors.ClosedError("gone"),
        errors.GidError("none"),
        errors.ExchangeError("peer"),
        errors.DeviceNotFoundError("none"),
    ],
)
def test_the_other_errors_survive_pickling(error: RdmaError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_importing_aiordma_needs_no_device_and_prints_nothing() -> None:
    import sys

    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", "import aiordma"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
