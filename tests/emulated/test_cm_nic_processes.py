"""Connections between processes: the life of one, and what is heard of an end whose process is killed or stopped."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emulated.ipc import Process, processes

SETUP = """
from aiordma import emulator
from emulated import cm_abi as abi
cm = abi.Cm()
state = {}
def event(): e = cm.event(); state[e.event] = e.id; return [e.event, e.status]
True
"""

CONNECT_REQUEST, CONNECT_RESPONSE, UNREACHABLE, REJECTED = 4, 5, 7, 8
ESTABLISHED, DISCONNECTED, TIMEWAIT_EXIT = 9, 10, 15
CONSUMER_DEFINED, INVALID_SERVICE_ID, ETIMEDOUT = 28, 8, 110


class Two(SimpleNamespace):
    """A server that listens and a client, each in a process."""

    server: Process
    client: Process

    def to(self, stage: str) -> None:
        """Bring a connection to a stage."""
        self.client(f"state['id'] = cm.ready({self.port}); cm.connect(state['id'])")
        if stage == "requested":  # what the server hasn't fetched
            assert self.server("cm.readable(20000)")
            return
        assert self.server("event()") == [CONNECT_REQUEST, 0]
        if stage == "fetched":
            return
        self.server("state['id'] = state[4]; cm.accept(state['id'])")
        assert self.client("event()") == [CONNECT_RESPONSE, 0]
        if stage == "answered":
            return
        self.client("cm.establish(state['id'])")
        assert self.server("event()") == [ESTABLISHED, 0]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    # Three seconds of patience instead of the kernel's seventy-four: enough for a thread to get its CPU.
    config: dict[str, Any] = {"cm_response_timeout": 17, "cm_retries": 2}
    with processes(tmp_path, **config) as (server, client):
        server(SETUP)
        client(SETUP)
        port = server("state['listener'] = cm.listener(); cm.port(state['listener'])")
        yield Two(server=server, client=client, port=port)


def test_the_life_of_a_connection_between_processes(two: Two) -> None:
    two.to("connected")
    two.client("cm.disconnect(state['id'])")
    assert two.server("event()") == [DISCONNECTED, 0]
    two.server("cm.disconnect(state['id'])")
    assert two.client("event()") == [DISCONNECTED, 0]
    assert two.client("event()") == [TIMEWAIT_EXIT, 0]
    assert two.client("cm.destroy(state['id'])") == 5
    two.client("cm.close()")
    assert two.client("emulator.connection_counts()") == {"channels": 0, "ids": 0, "links": 0}


def test_a_port_is_one_process_s_at_a_time(two: Two) -> None:
    bind = f"cm.error('bind', cm.create(), '127.0.0.1', {two.port})"
    assert two.client(bind) == 98, "EADDRINUSE"
    two.server.kill()
    two.client(f"cm.bind(cm.create(), '127.0.0.1', {two.port})")


def test_processes_with_other_addresses_connect(tmp_path: Path, two: Two) -> None:
    """The client's table has no GID of the server's."""
    with processes(tmp_path, 1, devices=2) as (with_other,):
        with_other(SETUP)
        with_other(f"state['id'] = cm.ready({two.port}, source='192.0.2.3'); cm.connect(state['id'])")
        assert two.server("event()") == [CONNECT_REQUEST, 0]
        two.server("cm.accept(state[4])")
        assert with_other("event()") == [CONNECT_RESPONSE, 0]


@pytest.mark.parametrize(
    ("stage", "heard"),
    [
        ("requested", [REJECTED, CONSUMER_DEFINED]),
        ("fetched", [REJECTED, CONSUMER_DEFINED]),
        ("answered", [REJECTED, CONSUMER_DEFINED]),
        ("connected", [DISCONNECTED, 0]),
    ],
)
def test_the_server_is_killed(two: Two, stage: str, heard: list[int]) -> None:
    two.to(stage)
    two.server.kill()
    assert two.client("event()") == heard
    two.client(f"cm.connect(cm.ready({two.port}))")
    assert two.client("event()") == [REJECTED, INVALID_SERVICE_ID]
    assert two.client("cm.destroy(state['id'])") > 0


@pytest.mark.parametrize(
    ("stage", "heard"), [("answered", [REJECTED, CONSUMER_DEFINED]), ("connected", [DISCONNECTED, 0])]
)
def test_the_client_is_killed(two: Two, stage: str, heard: list[int]) -> None:
    two.to(stage)
    two.client.kill()
    assert two.server("event()") == heard


def test_a_request_of_a_killed_client_can_t_be_accepted(two: Two) -> None:
    two.to("fetched")
    two.client.kill()
    deadline = time.monotonic() + 20
    while two.server("emulator.connection_counts()")["links"]:
        assert time.monotonic() < deadline
    assert two.server("cm.error('accept', state[4])") == 22, "EINVAL"
    two.server("cm.destroy(state[4])")


def test_closing_is_heard_as_killing_is(two: Two) -> None:
    two.to("connected")
    two.server("cm.close()")
    assert two.client("event()") == [DISCONNECTED, 0]


def test_a_stopped_server_is_waited_for(two: Two) -> None:
    two.server.stop()
    two.client(f"state['id'] = cm.ready({two.port}); cm.connect(state['id'])")
    assert two.client("event()") == [UNREACHABLE, -ETIMEDOUT]
    two.server.go_on()
    # It finds the request that waited, once, and learns that nobody waits for the answer when it gives one.
    assert two.server("event()") == [CONNECT_REQUEST, 0]


def test_a_stopped_peer_doesn_t_answer_a_disconnect(two: Two) -> None:
    two.to("connected")
    two.server.stop()
    two.client("cm.disconnect(state['id'])")
    assert two.client("event()") == [DISCONNECTED, -ETIMEDOUT]
    two.server.go_on()
    assert two.server("event()") == [DISCONNECTED, 0]


def test_a_slow_application_is_waited_for(two: Two) -> None:
    """Its connection manager says that it needs time, where a stopped one's can't."""
    two.to("fetched")
    time.sleep(4)
    assert not two.client("cm.readable()")
    two.server("cm.accept(state[4])")
    assert two.client("event()") == [CONNECT_RESPONSE, 0]


def test_a_full_backlog_is_tried_again(two: Two) -> None:
    port = two.server("state['small'] = cm.listener(backlog=1); cm.port(state['small'])")
    two.client(f"state['ids'] = [cm.ready({port}) for _ in range(2)]; [cm.connect(i) for i in state['ids']]")
    assert two.server("event()") == [CONNECT_REQUEST, 0]
    assert two.server("event()") == [CONNECT_REQUEST, 0], "sent again, and now there is room"


def test_nobody_makes_room(two: Two) -> None:
    port = two.server("state['small'] = cm.listener(backlog=1); cm.port(state['small'])")
    two.client(f"[cm.connect(cm.ready({port})) for _ in range(2)]")
    assert two.client("event()") == [UNREACHABLE, -ETIMEDOUT]


def test_rubbish_in_the_folder_s_socket_is_ignored(tmp_path: Path, two: Two) -> None:
    two.to("connected")
    garbage = """
import glob, os, random, socket
random.seed(7)
for path in glob.glob(os.environ['AIORDMA_EMULATOR_RUNTIME_DIR'] + '/*/cm-*'):
    for size in (1, 100, 340, 348, 352, 356, 360, 4000):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
                s.connect(path)
                s.send(random.randbytes(size))
                s.send(bytes([random.randrange(10), 0, 0, 0]) + random.randbytes(size))
True
"""
    with processes(tmp_path, 1) as (other,):
        assert other(garbage)
    assert not two.client("cm.readable()")
    two.client("cm.disconnect(state['id'])")
    assert two.server("event()") == [DISCONNECTED, 0]


def test_a_forked_child_s_copies_do_nothing(two: Two) -> None:
    two.to("connected")
    child = """
import os, errno
pid = os.fork()
if not pid:
    codes = [cm.error("disconnect", state['id']), cm.error("get_event")]
    fresh = abi.Cm()
    fresh.bind(fresh.create())
    fresh.close()
    os._exit(codes != [errno.EIO, errno.EIO])
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert two.client(child) == 0
    two.client("cm.disconnect(state['id'])")
    assert two.server("event()") == [DISCONNECTED, 0]


def test_a_table_of_ports_that_was_cut_short_or_overwritten(tmp_path: Path, two: Two) -> None:
    (table,) = tmp_path.glob("*/ports")
    two.to("connected")
    two.client("state['bound'] = cm.create(); cm.bind(state['bound'])")
    for content in (b"", b"\xff" * 3_000_000, bytes(100), b"\xff" * 100):
        table.write_bytes(content)
        two.client(f"fresh = abi.Cm(); fresh.connect(fresh.ready({two.port})); fresh.close()")
        two.server("fresh = abi.Cm(); fresh.listener(); fresh.close()")
    two.client("cm.error('listen', state['bound']); cm.destroy(state['bound'])")
    two.client("cm.disconnect(state['id'])")
    assert two.server("event()") == [DISCONNECTED, 0]
    table.unlink()
    two.server("cm.close()")
    two.server("cm = abi.Cm(); cm.port(cm.listener())")


def test_a_process_that_keeps_to_itself(tmp_path: Path, two: Two) -> None:
    with processes(tmp_path, 1, reach="process") as (alone,):
        alone(SETUP)
        assert alone(f"cm.port(cm.listener(port={two.port}))") == two.port, "its ports are its own"
        alone(f"cm.connect(cm.ready({two.port}))")
        assert alone("[cm.event().event for _ in range(1)]") == [CONNECT_REQUEST]
        alone(f"cm.connect(cm.ready({two.port + 1}))")
        assert alone("event()") == [REJECTED, INVALID_SERVICE_ID]
    assert not two.server("cm.readable()")
