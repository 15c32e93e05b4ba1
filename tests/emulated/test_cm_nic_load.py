"""Many connections, and many wrong commands: nothing is left behind, and nothing breaks."""

import contextlib
import os
import random
import resource
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import pyverbs.cm_enums as ce
from emulated import cm_abi as abi
from emulated import cm_ids
from emulated.cm_abi import Cm, establish
from emulated.ipc import processes
from hypothesis import given, settings
from hypothesis import strategies as st
from pyverbs.cmid import CMID, ConnParam

from aiordma import emulator

pytestmark = pytest.mark.librdmacm

SETUP = """
from aiordma import emulator
from emulated import cm_abi as abi
import os
def fds(): return len(os.listdir('/proc/self/fd'))
def rss(): return int(open('/proc/self/statm').read().split()[1])
True
"""


@pytest.fixture(scope="module", autouse=True)
def device_is_open() -> None:
    """What librdmacm opens with the first connection, and never closes."""
    cm_ids.connect(cm_ids.free_port()).close()


@pytest.fixture(autouse=True)
def nothing_is_left(emulated_nic: object) -> Iterator[None]:
    """Check that descriptors and identifiers go with the test."""
    before, fds = emulator.connection_counts(), len(os.listdir("/proc/self/fd"))
    yield
    assert emulator.connection_counts() == before
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_thousand_connections_one_after_the_other_between_processes(tmp_path: Path) -> None:
    with processes(tmp_path) as (server, client):
        for process in (server, client):
            process(SETUP)
        port = server("cm = abi.Cm(); listener = cm.listener(); cm.port(listener)")
        serve = """
def serve(n):
    for _ in range(n):
        id = cm.expect(abi.CONNECT_REQUEST).id
        cm.accept(id)
        cm.expect(abi.ESTABLISHED)
        cm.expect(abi.DISCONNECTED)
        cm.destroy(id)
    return emulator.connection_counts()['ids'], fds(), rss()
True
"""
        ask = f"""
cm = abi.Cm()
def ask(n):
    for _ in range(n):
        id = cm.ready({port})
        cm.connect(id)
        cm.expect(abi.CONNECT_RESPONSE)
        cm.establish(id)
        cm.disconnect(id)
        cm.destroy(id)
    return emulator.connection_counts()['ids'], fds(), rss()
True
"""
        server(serve)
        client(ask)
        found = []
        for n in (100, 900):
            server.start(f"serve({n})")
            client.start(f"ask({n})")
            found.append((client.result(), server.result()))
        for before, after in zip(*found, strict=True):
            assert after[:2] == before[:2]
            if "AIORDMA_EMULATOR_LIBRARY" not in os.environ:  # a sanitizer keeps what was freed
                assert after[2] - before[2] < 256, "pages: less than one for three connections"


def test_two_hundred_connections_at_a_time_between_processes(tmp_path: Path) -> None:
    with processes(tmp_path) as (server, client):
        for process in (server, client):
            process(SETUP)
        port = server("cm = abi.Cm(); listener = cm.listener(backlog=256); before = fds(); cm.port(listener)")
        server.start(
            """
pending = [cm.expect(abi.CONNECT_REQUEST).id for _ in range(200)]
for id in pending: cm.accept(id)
for _ in pending: cm.expect(abi.ESTABLISHED)
sorted(cm.qp_attr(id, abi.RTR)['dest_qp_num'] for id in pending)
"""
        )
        assert client(
            f"""
cm = abi.Cm()
ids = [cm.ready({port}, uid=n + 1) for n in range(200)]
for n, id in enumerate(ids): cm.connect(id, abi.params(1000 + n))
for _ in ids: cm.establish(cm.expect(abi.CONNECT_RESPONSE).id)
True
"""
        )
        assert server.result() == [1000 + n for n in range(200)], "each has its peer"
        client("cm.close()")
        server("[cm.expect(abi.DISCONNECTED) for _ in pending]; [cm.destroy(id) for id in pending]; cm.close()")
        for process in (server, client):
            assert process("emulator.connection_counts()") == {"channels": 0, "ids": 0, "links": 0}


def test_a_hundred_connections_with_queue_pairs(leak_check: None) -> None:
    """Each with everything that librdmacm makes for it."""
    server_channel, client_channel = cm_ids.Channel(), cm_ids.Channel()
    port = cm_ids.free_port()
    listener = cm_ids.listen(server_channel, port=port)
    for _ in range(100):
        client = cm_ids.resolve(client_channel, port)
        client.create_qp(cm_ids.qp_init())
        client.connect(ConnParam())
        request = server_channel.event()
        server = CMID(creator=request, listen_id=listener)
        request.ack_cm_event()
        server.create_qp(cm_ids.qp_init())
        server.accept(ConnParam())
        client_channel.expect(ce.RDMA_CM_EVENT_ESTABLISHED)
        server_channel.expect(ce.RDMA_CM_EVENT_ESTABLISHED)
        client.disconnect()
        server_channel.expect(ce.RDMA_CM_EVENT_DISCONNECTED)
        client.close()
        server.close()
    for thing in (listener, server_channel, client_channel):
        thing.close()


def test_channels_and_threads_of_their_own() -> None:
    with Cm() as server:
        port = server.port(server.listener(backlog=64))
        errors: list[BaseException] = []

        def client(n: int) -> None:
            try:
                for _ in range(20):
                    with Cm() as cm:
                        cm.connect(cm.ready(port), abi.params(n))
                        cm.expect(abi.CONNECT_RESPONSE)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(160):
            event = server.expect(abi.CONNECT_REQUEST)
            server.accept(event.id, uid=0)  # whose events aren't told
        for thread in threads:
            thread.join(60)
        assert not errors


def test_descriptors_run_out() -> None:
    with Cm() as first:  # with it, all that exists once is open
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened: list[Cm] = []
        left: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    opened.append(Cm())
            # One that couldn't be opened may have left a descriptor, where it needed two.
            with contextlib.suppress(OSError):
                while True:
                    left.append(os.dup(0))
            # What waits needs a descriptor more, and says so: EMFILE.
            assert first.error("get_event") == 24
            assert opened
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in left:
                os.close(fd)
            for cm in opened:
                cm.close()


def run_commands(commands: list[tuple[int, int, int, bytes]]) -> None:
    with Cm(os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK) as cm:
        target = cm.listener()
        buffer = abi.ctypes.create_string_buffer(1 << 16)
        for number, length, out, body in commands:
            # A place for the response that is there: what comes first in most commands, the uid in others.
            body = struct.pack("=Q", abi.ctypes.addressof(buffer)) + body[8:] if len(body) >= 8 else body
            with contextlib.suppress(OSError):
                cm.write(struct.pack("=IHH", number, length, out) + body)
        assert cm.port(target)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 24),
            st.integers(0, 700),
            st.sampled_from([0, 4, 64, 144, 280, 336, 65535]),
            st.binary(max_size=600),
        ),
        max_size=8,
    )
)
def test_random_commands(commands: list[tuple[int, int, int, bytes]]) -> None:
    run_commands(commands)


@pytest.mark.parametrize("seed", range(4))
def test_random_but_sensible_commands(seed: int) -> None:
    """Whatever the order, each is done or refused, and the count of identifiers is right at the end."""
    choose = random.Random(seed)
    with Cm(os.O_RDWR | os.O_NONBLOCK) as a, Cm(os.O_RDWR | os.O_NONBLOCK) as b:
        ids: dict[Cm, list[int]] = {a: [], b: []}
        ports = [a.port(a.listener(backlog=4)), b.port(b.listener(ps=abi.UDP, backlog=4))]

        def create(cm: Cm) -> None:
            ids[cm].append(cm.create(choose.choice([abi.TCP, abi.UDP, abi.IB])))

        def event(cm: Cm) -> None:
            found = cm.get_event()
            if found.event == abi.CONNECT_REQUEST:
                ids[cm].append(found.id)

        def destroy(cm: Cm, id: int) -> None:
            cm.destroy(id)
            ids[cm].remove(id)

        def migrate(cm: Cm, id: int) -> None:
            other = b if cm is a else a
            other.migrate(id, cm)
            ids[cm].remove(id)
            ids[other].append(id)

        actions = [
            lambda cm, id: cm.bind(id),
            lambda cm, id: cm.resolve_addr(id, "127.0.0.1", choose.choice([*ports, 9])),
            lambda cm, id: cm.resolve_route(id),
            lambda cm, id: cm.connect(id),
            lambda cm, id: cm.listen(id, 2),
            lambda cm, id: cm.accept(id),
            lambda cm, id: cm.establish(id),
            lambda cm, id: cm.reject(id),
            lambda cm, id: cm.disconnect(id),
            lambda cm, id: cm.notify(id),
            lambda cm, id: cm.qp_attr(id, choose.randrange(8)),
            lambda cm, id: cm.query_addr(id),
            destroy,
            migrate,
        ]
        for _ in range(3000):
            cm = choose.choice([a, b])
            try:
                if choose.random() < 0.3:
                    event(cm)
                elif choose.random() < 0.1 or not ids[cm]:
                    create(cm)
                else:
                    choose.choice(actions)(cm, choose.choice(ids[cm]))
            except OSError:
                continue
        alive = sum(map(len, ids.values())) + 2
        assert emulator.connection_counts()["ids"] >= alive
        for cm in (a, b):
            for id in ids[cm]:
                cm.destroy(id)


def test_messages_between_channels_of_a_process_need_no_descriptor() -> None:
    with Cm() as server, Cm() as client:
        mine, theirs = establish(server, client, server.listener())
        assert emulator.connection_counts()["links"] == 0
        assert mine != theirs
