"""Compares the outcomes of one program on two devices, the first of them the emulated NIC."""

from typing import Any

from rxe.differential.program import SIZE, Batch, Op, Piece, Program, Recv

SUCCESS, LOC_LEN, LOC_QP_OP, LOC_PROT, REM_INV_REQ, REM_OP = 0, 1, 2, 4, 9, 11

#: Statuses of rxe that aren't those of the emulated NIC, by what fails: (emulated, rxe). docs/soft-roce.md has the reasons.
RXE_STATUSES: dict[str, set[tuple[int, int]]] = {
    "bad lkey": {(LOC_PROT, LOC_QP_OP)},
    "message longer than its receive": {(REM_INV_REQ, REM_OP), (LOC_LEN, LOC_QP_OP)},
    "receive with a bad lkey": {(LOC_PROT, LOC_QP_OP)},
    "receive into memory without LOCAL_WRITE": {(LOC_PROT, LOC_QP_OP)},
}
#: What rxe's library refuses to post, with EINVAL, rather than have it fail.
RXE_REFUSES = {"misaligned atomic"}


def differences(plan: Program, emulated: dict[str, Any], other: dict[str, Any], *, rxe: bool) -> list[str]:
    """What is different, a line each, but for the known properties of rxe if the other device is one."""
    if "exception" in other or "exception" in emulated:
        if (
            rxe
            and plan.failure in RXE_REFUSES
            and "Errno: 22" in other.get("exception", "")
            and "exception" not in emulated
        ):
            return []
        return [f"exception: {emulated.get('exception')} / {other.get('exception')}"]
    found = []
    if emulated["states"] != other["states"]:
        found.append(f"states of the QPs: {emulated['states']} / {other['states']}")
    allowed = RXE_STATUSES.get(plan.failure or "", set()) if rxe else set()
    for queue in ("sent", "received"):
        for end in range(2):
            found += _of_queue(f"{queue} by end {end}", emulated[queue][end], other[queue][end], allowed)
    for end in range(2):
        open_bytes = _undefined(plan, emulated, end)
        a, b = (bytes.fromhex(outcome["memory"][end]) for outcome in (emulated, other))
        places = [i for i in range(SIZE) if a[i] != b[i] and i not in open_bytes]
        if places:
            found.append(f"memory of end {end}: {len(places)} bytes from offset {places[0]} on")
    return found


def _of_queue(what: str, emulated: list[Any], other: list[Any], allowed: set[tuple[int, int]]) -> list[str]:
    found = []
    if len(emulated) != len(other):
        found.append(f"{what}: {len(emulated)} / {len(other)} completions")
    for a, b in zip(emulated, other, strict=False):
        if a != b and not (a[0] == b[0] and (a[1], b[1]) in allowed):
            found.append(f"{what}: [wr_id, status, ...] {a} / {b}")
    return found


def _undefined(plan: Program, outcome: dict[str, Any], end: int) -> set[int]:
    """Where the contents are undefined: buffers that a request which failed was to fill."""
    failed = {wr_id for wr_id, status, *_ in outcome["sent"][end] + outcome["received"][end] if status != SUCCESS}
    pieces: list[Piece] = []
    for step in plan.steps:
        wrs: tuple[Op | Recv, ...] = ()
        if isinstance(step, Recv) and step.end == end:
            wrs = (step,)
        elif isinstance(step, Batch):
            wrs = step.ops if step.end == end else step.late
        for wr in wrs:
            fills = isinstance(wr, Recv) or wr.opcode in ("READ", "CMP_SWP", "FETCH_ADD")
            if wr.wr_id in failed and fills:
                pieces += wr.pieces
    return {i for piece in pieces for i in range(piece.offset, piece.offset + piece.length)}
