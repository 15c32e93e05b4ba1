"""Random programs of verbs operations: a seed gives one, always the same.

A program has two ends, connected QPs with memory of their own, and steps. Its outcome on a device that keeps to the
specification is one and no other: so the generator avoids what is left open there. Buffers that a read or an atomic of the
same batch fills aren't touched in it, a request that will fail comes alone behind what is done, and of a QP in error
nothing more is asked than flushes.
"""

import random
from dataclasses import dataclass, field

#: Bytes of memory of each end, and in front of them room for the GRH of a datagram (40 bytes).
SIZE = 4096
GRH_ROOM = 64
GRH = 40

#: What a peer may do, by its name in the results.
RIGHTS = ("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ", "REMOTE_ATOMIC")
TYPES = ("RC", "UC", "UD")
#: Ways to fail, each of which ends the connection.
FAILURES = (
    "bad rkey",
    "remote out of bounds",
    "bad lkey",
    "local out of bounds",
    "read into a bad lkey",
    "read into memory without LOCAL_WRITE",
    "misaligned atomic",
    "memory without the right",
    "QP without the right",
    "message longer than its receive",
    "no receive",
    "receive with a bad lkey",
    "receive into memory without LOCAL_WRITE",
    "peer in error",
)

#: Those that the peer hears nothing of, or that are no error of its: its QP stays as it is.
ONE_SIDED = frozenset(
    {
        "bad lkey",
        "local out of bounds",
        "read into a bad lkey",
        "read into memory without LOCAL_WRITE",
        "no receive",
    }
)


@dataclass(frozen=True)
class Piece:
    """A buffer of a work request: an offset into the end's memory. ``bad_key``: with an lkey that isn't one."""

    offset: int
    length: int
    bad_key: bool = False


@dataclass(frozen=True)
class Recv:
    """A receive to post."""

    end: int
    wr_id: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Op:
    """A request to post. ``remote`` is an offset into the peer's memory."""

    wr_id: int
    opcode: str
    pieces: tuple[Piece, ...]
    remote: int = 0
    bad_rkey: bool = False
    imm: int | None = None
    compare_add: int = 0
    swap: int = 0
    inline: bool = False
    signalled: bool = True
    fenced: bool = False
    solicited: bool = False

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class Batch:
    """Requests of one end, posted one after the other and waited for. ``late``: receives that the peer posts after them."""

    end: int
    ops: tuple[Op, ...]
    late: tuple[Recv, ...] = ()


@dataclass(frozen=True)
class ToError:
    """A QP that its owner moves to the error state."""

    end: int


Step = Recv | Batch | ToError


@dataclass
class Program:
    """What two ends do. ``failure`` names how it ends, if it doesn't end well."""

    seed: int
    qp_type: str
    path_mtu: int
    max_sge: int
    sq_sig_all: bool
    rnr_retry: int
    psn: tuple[int, int]
    rights: tuple[frozenset[str], frozenset[str]]
    qp_rights: tuple[frozenset[str], frozenset[str]]
    steps: list[Step] = field(default_factory=list)
    failure: str | None = None

    @property
    def states(self) -> list[str]:
        """What the states of the QPs are to be at the end."""
        if self.failure is None:
            return ["RTS", "RTS"]
        fails = self.steps[-1].end
        return ["RTS" if self.failure in ONE_SIDED and end != fails else "ERR" for end in range(2)]

    def describe(self) -> str:
        """The program, one step a line."""
        head = (
            f"seed {self.seed}: {self.qp_type}, path MTU {self.path_mtu}, {self.max_sge} SGEs, rnr_retry {self.rnr_retry}, "
            f"sq_sig_all {self.sq_sig_all}, PSNs {self.psn}, memory {[sorted(r) for r in self.rights]}, "
            f"QPs {[sorted(r) for r in self.qp_rights]}, ends with {self.failure or 'success'}"
        )
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


MTUS = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


class _Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        qp_type = rng.choices(TYPES, (16, 2, 3))[0]
        failure = rng.choice(FAILURES) if qp_type == "RC" and rng.random() < 0.6 else None
        everything = frozenset(RIGHTS)
        self.program = Program(
            seed=seed,
            qp_type=qp_type,
            path_mtu=rng.choice(list(MTUS)),
            max_sge=rng.randint(1, 4),
            sq_sig_all=rng.random() < 0.2,
            rnr_retry=rng.choice([0, 1, 2]) if failure == "no receive" else 7,
            psn=(rng.getrandbits(24), rng.getrandbits(24)),
            rights=(everything, everything),
            qp_rights=(everything, everything),
            failure=failure,
        )
        self.wr_id = 0
        # Room in the receives that wait at each end, in order.
        self.waiting: tuple[list[int], list[int]] = ([], [])

    # ---------------------------------------------------------------- pieces

    def number(self) -> int:
        self.wr_id += 1
        return self.wr_id

    def pieces(self, length: int) -> tuple[Piece, ...]:
        """``length`` bytes in up to max_sge pieces that don't overlap."""
        rng = self.rng
        if length == 0:
            return (Piece(rng.randrange(SIZE), 0),)  # pyverbs wants one in any case
        count = min(rng.randint(1, self.program.max_sge), length)
        cuts = sorted(rng.sample(range(1, length), count - 1)) if count > 1 else []
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
        # The gaps between them share what is left of the memory.
        room = SIZE - length
        starts = sorted(rng.randint(0, room) for _ in lengths)
        done, found = 0, []
        for start, part in zip(starts, lengths, strict=True):
            found.append(Piece(start + done, part))
            done += part
        rng.shuffle(found)
        return tuple(found)

    def length(self) -> int:
        rng, mtu = self.rng, self.program.path_mtu
        if self.program.qp_type == "UD":
            # Both ports have an MTU of 4096, whatever the path's says; 1024 fits everywhere.
            return rng.choice([0, 1, 8, 100, 1000, 1024])
        near = rng.choice([mtu, 2 * mtu]) + rng.choice([-1, 0, 1])
        return min(rng.choice([0, 1, 7, 8, 64, near, rng.randint(0, SIZE // 2)]), SIZE // 2)

    def recv(self, end: int, length: int) -> Recv:
        pieces = self.pieces(length)
        if self.program.qp_type == "UD":
            # One piece for the GRH, which tells of addresses and isn't compared.
            merged = Piece(self.rng.randint(0, SIZE - length), length)
            pieces = (Piece(-GRH_ROOM, GRH), merged)
        self.waiting[end].append(length)
        return Recv(end, self.number(), pieces)

    # ---------------------------------------------------------------- operations

    def good_op(self, end: int) -> Op:
        """A request that succeeds."""
        rng = self.rng
        kinds = {
            "RC": ["SEND", "WRITE", "WRITE_IMM", "READ", "CMP_SWP", "FETCH_ADD"],
            "UC": ["SEND", "WRITE", "WRITE_IMM"],
        }
        kind = rng.choice(kinds.get(self.program.qp_type, ["SEND"]))
        receives = self.waiting[1 - end]
        if kind in ("SEND", "WRITE_IMM") and not receives:
            kind = "WRITE" if self.program.qp_type != "UD" else ""
        flags = {
            "signalled": rng.random() < 0.7,
            "fenced": self.program.qp_type == "RC" and rng.random() < 0.15,
            "solicited": rng.random() < 0.1,
        }
        if kind in ("CMP_SWP", "FETCH_ADD"):
            # Small numbers, so that compares succeed now and then.
            return Op(
                self.number(), kind, (Piece(8 * rng.randrange(SIZE // 8), 8),), remote=8 * rng.randrange(SIZE // 8),
                compare_add=rng.choice([0, 1, 2**64 - 1, rng.getrandbits(64)]), swap=rng.choice([0, rng.getrandbits(64)]),
                **flags,
            )  # fmt: skip
        if kind == "SEND":
            length = min(self.length(), receives.pop(0))
        else:
            length = self.length()
        if kind == "WRITE_IMM":
            receives.pop(0)
        inline = kind != "READ" and length <= 64 and rng.random() < 0.3
        imm = rng.getrandbits(32) if kind == "WRITE_IMM" or (kind == "SEND" and rng.random() < 0.4) else None
        return Op(
            self.number(), kind, self.pieces(length), remote=rng.randint(0, SIZE - length), imm=imm, inline=inline, **flags
        )  # fmt: skip

    def batch(self, end: int, most: int) -> Batch:
        """Some requests that succeed, the last of them signalled."""
        ops: list[Op] = []
        filled: list[tuple[int, int]] = []
        sources: list[tuple[int, int]] = []
        for _ in range(self.rng.randint(1, most)):
            if self.program.qp_type == "UD" and not self.waiting[1 - end]:
                break
            before = (self.wr_id, list(self.waiting[1 - end]))
            op = self.good_op(end)
            touched = [(piece.offset, piece.offset + piece.length) for piece in op.pieces]
            fills = op.opcode in ("READ", "CMP_SWP", "FETCH_ADD")
            # What is sent may be read again, for a retransmission, until it's acknowledged.
            if any(a < d and c < b for a, b in touched for c, d in (filled + sources if fills else filled)):
                self.wr_id, self.waiting[1 - end][:] = before
                break
            (filled if fills else sources).extend(touched)
            ops.append(op)
        if ops:
            ops[-1] = _signalled(ops[-1])
        return Batch(end, tuple(ops))

    def late_batch(self, end: int) -> Batch:
        """Sends whose receives come later: the RNR retries see to them."""
        lengths = [min(self.length(), 512) for _ in range(self.rng.randint(1, 3))]
        ops = [Op(self.number(), "SEND", self.pieces(length)) for length in lengths]
        late = tuple(self.recv(1 - end, length) for length in lengths)
        self.waiting[1 - end].clear()
        return Batch(end, tuple(ops), late)

    def failing(self, end: int) -> list[Step]:
        """Steps of which the last request, or the first, fails as the program's ``failure`` says."""
        rng, failure = self.rng, self.program.failure
        assert failure is not None
        behind = tuple(self.behind() for _ in range(rng.randint(0, 3)))
        steps: list[Step] = []
        # Sends must meet the receive that they are meant for, so those that wait are used up.
        while self.waiting[1 - end]:
            length = min(self.waiting[1 - end].pop(0), 16)
            steps.append(Batch(end, (Op(self.number(), "SEND", self.pieces(length)),)))
        length = rng.choice([1, 8, 100, self.program.path_mtu + 1])
        length = min(length, SIZE // 2)
        pieces = self.pieces(length)
        bad = (*pieces[:-1], Piece(pieces[-1].offset, pieces[-1].length, bad_key=True))
        outside = (Piece(SIZE - length + rng.randint(1, length), length),)
        remote = rng.randint(0, SIZE - length)
        kinds = ["WRITE", "READ", "CMP_SWP", "FETCH_ADD"]
        kind = rng.choice(kinds)
        op: Op
        match failure:
            case "bad rkey":
                op = self.one_sided(kind, pieces, remote, bad_rkey=True)
            case "remote out of bounds":
                op = self.one_sided(kind, pieces, SIZE - 8 * (kind not in ("WRITE", "READ")) + 8, bad_rkey=False)
                if kind in ("WRITE", "READ"):
                    op = self.one_sided(kind, pieces, SIZE - length + rng.randint(1, length))
            case "bad lkey":
                op = rng.choice([self.one_sided("WRITE", bad, remote), Op(self.number(), "SEND", bad)])
            case "local out of bounds":
                op = rng.choice([self.one_sided("WRITE", outside, remote), Op(self.number(), "SEND", outside)])
            case "read into a bad lkey":
                op = self.one_sided("READ", bad, remote)
            case "read into memory without LOCAL_WRITE":
                self.limit_memory(end, "LOCAL_WRITE")
                op = self.one_sided("READ", pieces, remote)
            case "misaligned atomic":
                op = self.one_sided(
                    rng.choice(["CMP_SWP", "FETCH_ADD"]), pieces, 8 * rng.randrange(100) + rng.randint(1, 7)
                )
            case "memory without the right":
                self.limit_memory(1 - end, _right(kind))
                op = self.one_sided(kind, pieces, remote)
            case "QP without the right":
                self.limit_qp(1 - end, _right(kind))
                op = self.one_sided(kind, pieces, remote)
            case "message longer than its receive":
                steps.append(self.recv(1 - end, length - 1))
                op = Op(self.number(), "SEND", pieces)
            case "no receive":
                op = Op(self.number(), "SEND", pieces)
            case "receive with a bad lkey":
                steps.append(Recv(1 - end, self.number(), bad))
                op = Op(self.number(), "SEND", self.pieces(length))
            case "receive into memory without LOCAL_WRITE":
                self.limit_memory(1 - end, "LOCAL_WRITE")
                steps.append(self.recv(1 - end, length))
                op = Op(self.number(), "SEND", pieces)
            case _:  # peer in error
                steps.append(ToError(1 - end))
                op = Op(self.number(), "SEND", pieces)
        # Receives behind it are flushed.
        steps += (
            [self.recv(rng.choice([end, 1 - end]), 8) for _ in range(rng.randint(0, 2))]
            if failure != "no receive"
            else []
        )
        steps.append(Batch(end, (op, *behind)))
        return steps

    def behind(self) -> Op:
        """A request behind one that fails: it's flushed, and nothing of it is done."""
        kind = self.rng.choice(["SEND", "WRITE", "READ"])
        pieces = self.pieces(self.rng.choice([0, 8]))
        return Op(self.number(), kind, pieces, remote=self.rng.randrange(SIZE - 8))

    def one_sided(self, kind: str, pieces: tuple[Piece, ...], remote: int, *, bad_rkey: bool = False) -> Op:
        if kind in ("CMP_SWP", "FETCH_ADD"):
            pieces = (Piece(8 * self.rng.randrange(SIZE // 8), 8),)
            if self.program.failure != "misaligned atomic":
                remote &= ~7
        return Op(self.number(), kind, pieces, remote=remote, bad_rkey=bad_rkey, compare_add=1)

    def limit_memory(self, end: int, right: str) -> None:
        rights = list(self.program.rights)
        # Remote write and atomic need local write (ibv_reg_mr(3)).
        rights[end] = rights[end] - {right} - ({"REMOTE_WRITE", "REMOTE_ATOMIC"} if right == "LOCAL_WRITE" else set())
        self.program.rights = (rights[0], rights[1])

    def limit_qp(self, end: int, right: str) -> None:
        rights = list(self.program.qp_rights)
        rights[end] = rights[end] - {right}
        self.program.qp_rights = (rights[0], rights[1])

    # ---------------------------------------------------------------- the whole

    def write(self) -> Program:
        program, rng = self.program, self.rng
        end = 0
        limited = program.failure in (
            "read into memory without LOCAL_WRITE",
            "receive into memory without LOCAL_WRITE",
            "memory without the right",
            "QP without the right",
        )
        # With fewer rights than all, what comes before would fail as well.
        for _ in range(0 if limited else rng.randint(1, 8)):
            end = rng.randrange(2)
            for _ in range(rng.randint(0, 3)):
                program.steps.append(self.recv(1 - end, self.length()))
            if program.qp_type == "RC" and rng.random() < 0.15 and not self.waiting[1 - end] and program.rnr_retry == 7:
                program.steps.append(self.late_batch(end))
                continue
            batch = self.batch(end, 6)
            if batch.ops:
                program.steps.append(batch)
        if program.failure is not None:
            program.steps += self.failing(rng.randrange(2))
        elif program.qp_type != "RC":
            # A completion says that a message is on its way: one more message, which the peer waits for, is behind it.
            for end in range(2):
                while self.waiting[1 - end]:
                    length = min(self.waiting[1 - end].pop(0), 16)
                    program.steps.append(Batch(end, (Op(self.number(), "SEND", self.pieces(length)),)))
                program.steps.append(self.recv(1 - end, 8))
                self.waiting[1 - end].clear()
                program.steps.append(Batch(end, (Op(self.number(), "SEND", self.pieces(8)),)))
        return program


def _signalled(op: Op) -> Op:
    return Op(**{**op.__dict__, "signalled": True})


def _right(kind: str) -> str:
    return {"WRITE": "REMOTE_WRITE", "READ": "REMOTE_READ"}.get(kind, "REMOTE_ATOMIC")


def program(seed: int) -> Program:
    """The program of a seed."""
    return _Writer(seed).write()
