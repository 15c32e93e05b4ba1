"""Connections through an unmodified librdmacm, both ends in this process."""

import pytest
import pyverbs.cm_enums as ce
from emulated import cm_ids as cm
from pyverbs.cmid import ConnParam

from aiordma import emulator

pytestmark = pytest.mark.librdmacm


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "192.0.2.1", "192.0.2.3"])
def test_two_ends_connect_exchange_a_message_and_disconnect(address: str) -> None:
    pair = cm.connect(cm.free_port(), address)
    theirs = pair.server.reg_msgs(64)
    pair.server.post_recv(theirs, 64)
    ours = pair.client.reg_msgs(64)
    ours.write(b"hello", 5)
    pair.client.post_send(ours, 0, 5)
    assert pair.client.get_send_comp().status == 0
    assert pair.server.get_recv_comp().byte_len == 5
    assert theirs.read(5, 0) == b"hello"

    pair.client.disconnect()
    pair.server_channel.expect(ce.RDMA_CM_EVENT_DISCONNECTED)
    assert not pair.client_channel.readable(), "DREP comes when the peer disconnects"
    pair.server.disconnect()
    pair.client_channel.expect(ce.RDMA_CM_EVENT_DISCONNECTED)

    pair.others += [ours, theirs]
    pair.close()
    assert emulator.connection_counts() == {"channels": 0, "ids": 0, "links": 0}


def test_nobody_listens() -> None:
    channel = cm.Channel()
    cm_id = cm.resolve(channel, cm.free_port())
    cm_id.create_qp(cm.qp_init())
    cm_id.connect(ConnParam())
    channel.expect(ce.RDMA_CM_EVENT_REJECTED)
    cm_id.close()
    channel.close()
    assert emulator.connection_counts() == {"channels": 0, "ids": 0, "links": 0}
