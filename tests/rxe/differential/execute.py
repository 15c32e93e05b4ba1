#!/usr/bin/env python3
"""Executes programs on a device, in a process of its own: a line of JSON for each, as {"seed", "outcome"}.

execute.py DEVICE [PEER-DEVICE] <seeds, a line each
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pyverbs import enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rxe.differential.program import GRH_ROOM, MTUS, SIZE, Batch, Op, Program, Recv, ToError, program

OPCODES = {
    "SEND": e.IBV_WR_SEND,
    "WRITE": e.IBV_WR_RDMA_WRITE,
    "WRITE_IMM": e.IBV_WR_RDMA_WRITE_WITH_IMM,
    "READ": e.IBV_WR_RDMA_READ,
    "CMP_SWP": e.IBV_WR_ATOMIC_CMP_AND_SWP,
    "FETCH_ADD": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
}
QP_TYPES = {"RC": e.IBV_QPT_RC, "UC": e.IBV_QPT_UC, "UD": e.IBV_QPT_UD}
QKEY = 0x22222222
STATES = {
    e.IBV_QPS_RESET: "RESET", e.IBV_QPS_INIT: "INIT", e.IBV_QPS_RTR: "RTR", e.IBV_QPS_RTS: "RTS",
    e.IBV_QPS_SQD: "SQD", e.IBV_QPS_SQE: "SQE", e.IBV_QPS_ERR: "ERR",
}  # fmt: skip
#: Seconds for what is certain to come; some machines are slow.
SOON = 30.0


def access(rights: frozenset[str]) -> int:
    return sum(getattr(e, f"IBV_ACCESS_{right}") for right in rights)


class Port:
    """An open device, and which of its GIDs to use."""

    def __init__(self, name: str) -> None:
        self.context = Context(name=name)
        self.pd = PD(self.context)
        self.gid_index = self._ipv4()

    def _ipv4(self) -> int:
        for index in range(self.context.query_port(1).gid_tbl_len):
            try:
                entry, gid = self.context.query_gid_ex(1, index), self.context.query_gid(1, index)
            except Exception:  # an empty entry
                continue
            if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2 and gid.gid.lower().startswith(
                "0000:0000:0000:0000:0000:ffff:"
            ):
                return index
        raise SystemExit(f"{self.context.name}: no IPv4 GID of type RoCE v2")


class End:
    """One end: memory, a QP, and what was completed on it."""

    def __init__(self, port: Port, which: int, plan: Program, own: contextlib.ExitStack) -> None:
        self.port, self.which, self.plan = port, which, plan
        self.scq = own.enter_context(CQ(port.context, 255))
        self.rcq = own.enter_context(CQ(port.context, 255))
        self.mr = own.enter_context(MR(port.pd, GRH_ROOM + SIZE, access(plan.rights[which])))
        self.mr.write(random.Random(plan.seed * 2 + which).randbytes(SIZE), SIZE, GRH_ROOM)
        cap = QPCap(
            max_send_wr=64,
            max_recv_wr=128,
            max_send_sge=plan.max_sge,
            max_recv_sge=plan.max_sge + 1,
            max_inline_data=64,
        )
        attributes = QPInitAttr(
            qp_type=QP_TYPES[plan.qp_type], scq=self.scq, rcq=self.rcq, cap=cap, sq_sig_all=int(plan.sq_sig_all)
        )
        self.qp = own.enter_context(QP(port.pd, attributes))
        self.own = own
        self.ah: AH | None = None
        self.sent: list[Any] = []
        self.received: list[Any] = []
        self.posted_receives = 0

    def connect(self, peer: "End") -> None:
        plan = self.plan
        route = GlobalRoute(dgid=peer.port.context.query_gid(1, peer.port.gid_index), sgid_index=self.port.gid_index)
        address = AHAttr(port_num=1, is_global=1, gr=route)
        values = {
            "port_num": 1, "qp_access_flags": access(plan.qp_rights[self.which]), "path_mtu": MTUS[plan.path_mtu],
            "dest_qp_num": peer.qp.qp_num, "rq_psn": plan.psn[1 - self.which], "sq_psn": plan.psn[self.which],
            # Two seconds and a half until a dead peer is given up. Not 7 retries, with which rxe never does.
            "max_rd_atomic": 8, "max_dest_rd_atomic": 8, "min_rnr_timer": 1, "timeout": 17, "retry_cnt": 4,
            "rnr_retry": plan.rnr_retry, "qkey": QKEY, "ah_attr": address,
        }  # fmt: skip
        attr = QPAttr()
        for name, value in values.items():
            setattr(attr, name, value)
        self.qp.to_rts(attr)
        if plan.qp_type == "UD":
            self.ah = self.own.enter_context(AH(self.port.pd, attr=address))

    # ---------------------------------------------------------------- posting

    def sges(self, wr: Op | Recv) -> list[SGE]:
        # A key that isn't one: keys' low byte is a matter of their owner, so the index must be another.
        return [
            SGE(self.mr.buf + GRH_ROOM + piece.offset, piece.length, self.mr.lkey ^ (0x5A5A00 if piece.bad_key else 0))
            for piece in wr.pieces
        ]

    def post_recv(self, recv: Recv) -> None:
        sges = self.sges(recv)
        self.qp.post_recv(RecvWR(wr_id=recv.wr_id, num_sge=len(sges), sg=sges))
        self.posted_receives += 1

    def post_send(self, op: Op, peer: "End") -> None:
        sges, opcode = self.sges(op), OPCODES[op.opcode]
        flags = 0
        for wanted, flag in (
            (op.signalled, e.IBV_SEND_SIGNALED),
            (op.fenced, e.IBV_SEND_FENCE),
            (op.solicited, e.IBV_SEND_SOLICITED),
            (op.inline, e.IBV_SEND_INLINE),
        ):
            flags |= flag if wanted else 0
        if op.opcode == "SEND" and op.imm is not None:
            opcode = e.IBV_WR_SEND_WITH_IMM
        wr = SendWR(
            wr_id=op.wr_id, opcode=opcode, num_sge=len(sges), sg=sges, imm_data=op.imm or 0, send_flags=flags
        )  # fmt: skip
        rkey, address = peer.mr.rkey ^ (0x5A5A00 if op.bad_rkey else 0), peer.mr.buf + GRH_ROOM + op.remote
        if op.opcode in ("CMP_SWP", "FETCH_ADD"):
            wr.set_wr_atomic(rkey, address, op.compare_add, op.swap)
        elif op.opcode != "SEND":
            wr.set_wr_rdma(rkey, address)
        elif self.ah is not None:
            wr.set_wr_ud(self.ah, peer.qp.qp_num, QKEY)
        self.qp.post_send(wr)

    # ---------------------------------------------------------------- completions

    def drain_sent(self, last: int) -> None:
        """Takes send completions up to that of ``last``."""
        for wc in take(self.scq, lambda: bool(self.sent) and self.sent[-1][0] == last):
            outcome = [wc.wr_id, wc.status]
            if wc.status == e.IBV_WC_SUCCESS:
                outcome.append(wc.opcode)
                # ibv_poll_cq(3) defines the length for what arrives.
                if wc.opcode in (e.IBV_WC_RDMA_READ, e.IBV_WC_COMP_SWAP, e.IBV_WC_FETCH_ADD):
                    outcome.append(wc.byte_len)
            self.sent.append(outcome)

    def drain_received(self, count: int) -> None:
        """Takes receive completions until there are ``count``."""
        for wc in take(self.rcq, lambda: len(self.received) >= count):
            outcome = [wc.wr_id, wc.status]
            if wc.status == e.IBV_WC_SUCCESS:
                with_imm = bool(wc.wc_flags & e.IBV_WC_WITH_IMM)
                outcome += [wc.opcode, wc.byte_len, with_imm, wc.imm_data if with_imm else None]
                if self.plan.qp_type == "UD":
                    outcome.append(bool(wc.wc_flags & e.IBV_WC_GRH))
            self.received.append(outcome)

    def to_error(self) -> None:
        attr = QPAttr()
        attr.qp_state = e.IBV_QPS_ERR
        self.qp.modify(attr, e.IBV_QP_STATE)

    @property
    def state(self) -> str:
        return STATES[self.qp.query(e.IBV_QP_STATE)[0].qp_state]


def take(cq: CQ, enough: Any) -> Iterator[WC]:
    """Completions until it's enough; those that are there come in any case."""
    deadline = time.monotonic() + SOON
    while not enough():
        count, found = cq.poll(1)
        if count:
            yield found[0]
        elif time.monotonic() > deadline:
            return


def execute(plan: Program, ports: tuple[Port, Port]) -> dict[str, Any]:
    """The program's outcome: all that a user of verbs can see of it."""
    with contextlib.ExitStack() as own:
        ends = (End(ports[0], 0, plan, own), End(ports[1], 1, plan, own))
        for end in ends:
            end.connect(ends[1 - end.which])
        for step in plan.steps:
            if isinstance(step, Recv):
                ends[step.end].post_recv(step)
            elif isinstance(step, ToError):
                ends[step.end].to_error()
            elif isinstance(step, Batch):
                here, there = ends[step.end], ends[1 - step.end]
                for op in step.ops:
                    here.post_send(op, there)
                for recv in step.late:
                    there.post_recv(recv)
                here.drain_sent(step.ops[-1].wr_id)
        states = settled_states(ends, plan)
        if plan.qp_type != "RC":
            # What the last message found is there when it is.
            for end in ends:
                end.drain_received(end.posted_receives)
        for end in ends:
            end.to_error()
        for end in ends:
            end.drain_received(end.posted_receives)
        return {
            "states": states,
            "sent": [end.sent for end in ends],
            "received": [end.received for end in ends],
            "memory": [bytes(end.mr.read(SIZE, GRH_ROOM)).hex() for end in ends],
        }


def settled_states(ends: tuple[End, End], plan: Program) -> list[str]:
    """The QPs' states. A completion may tell of an error before its QP is in ERR."""
    deadline = time.monotonic() + SOON
    while [end.state for end in ends] != plan.states and time.monotonic() < deadline:
        time.sleep(0.01)
    if plan.failure is not None and "RTS" in plan.states:
        time.sleep(0.2)  # time enough to change where it shouldn't
    return [end.state for end in ends]


def main() -> None:
    names = sys.argv[1:]
    if names[0].startswith("emulated:"):
        from aiordma import emulator

        names = [name.partition(":")[2] for name in names]
        emulator.attach(sorted(set(names)))
    ports = [Port(name) for name in names]
    for line in sys.stdin:
        seed = int(line)
        try:
            outcome = execute(program(seed), (ports[0], ports[-1]))
        except Exception as error:
            outcome = {"exception": f"{type(error).__name__}: {error}"}
        print(json.dumps({"seed": seed, "outcome": outcome}), flush=True)


if __name__ == "__main__":
    main()
