"""The layouts of firmware commands: what is set is read back, nothing else changes, and sizes are the PRM's."""

import pickle
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from aiordma import DevxError, UsageError, VerbsError
from aiordma.mlx5 import devx
from aiordma.mlx5.devx import caps, commands, contexts
from aiordma.mlx5.devx.prm import Array, Field, Nested, Raw, Struct

STRUCTS: list[type[Struct]] = sorted(
    {
        kind
        for module in (caps, commands, contexts)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.FIELDS
    },
    key=lambda kind: kind.__name__,
)

#: Bytes, as mlx5_ifc.h adds them up.
SIZES = {
    "Ads": 44,
    "Qpc": 232,
    "QpcExt": 192,
    "Cqc": 64,
    "Wq": 192,
    "Rqc": 240,
    "Rmpc": 240,
    "XrcSrqc": 64,
    "Rqtc": 240,
    "Mkc": 64,
    "Dctc": 64,
    "HcaCap": 256,
    "QueryHcaCapIn": 16,
    "QueryHcaCapOut": 4112,
    "QueryQpIn": 16,
    "QueryQpOut": 272,
    "Rst2InitQpIn": 464,
    "Rts2RtsQpIn": 464,
    "ToErrQpIn": 16,
    "CreateQpIn": 272,
    "QueryCqIn": 16,
    "QueryCqOut": 272,
    "ModifyCqIn": 272,
    "QueryRmpOut": 272,
    "ModifyRmpIn": 272,
    "QueryXrcSrqOut": 272,
    "QueryRqOut": 272,
    "ModifyRqIn": 272,
    "QueryRqtOut": 272,
    "ModifyRqtIn": 272,
    "CreateMkeyIn": 272,
    "CreateMkeyOut": 16,
    "QueryDctOut": 128,
}

#: Bits of a few fields that libmlx5 and the kernel agree on, counted from the start of the whole command.
POSITIONS = {
    (commands.QueryQpOut, "qpc.state"): (0xC0, 4),
    (commands.QueryQpOut, "qpc.remote_qpn"): (0xC0 + 0xA8, 24),
    (commands.QueryQpOut, "qpc.primary_address_path.vhca_port_num"): (0xC0 + 0xC0 + 0x128, 8),
    (commands.Init2InitQpIn, "qpc_data_ext.mmo"): (0x882, 1),
    (commands.Init2InitQpIn, "opt_param_mask_95_32"): (0x840, 64),
    (commands.QueryCqOut, "cq_context.producer_counter"): (0x80 + 0x168, 24),
    (commands.QueryRmpOut, "rmp_context.wq.lwm"): (0x100 + 0x180 + 0x30, 16),
    (commands.CreateMkeyIn, "memory_key_mkey_entry.translations_octword_size"): (0x80 + 0x1A0, 32),
    (commands.CreateMkeyIn, "memory_key_mkey_entry.access_mode_1_0"): (0x80 + 0x16, 2),
    (commands.QueryHcaCapOut, "capability.dma_mmo_qp"): (0x80 + 0x748, 1),
    (commands.CreateGeneralObjectIn, "obj_type"): (0x30, 16),
}


def _numbers(kind: type[Struct]) -> list[Field]:
    return [part for part in kind.FIELDS.values() if isinstance(part, Field)]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_fields_stay_within_and_apart(kind: type[Struct]) -> None:
    assert len(kind()) == kind.SIZE
    taken = 0
    for part in kind.FIELDS.values():
        assert part.end <= kind.SIZE * 8
        mask = ((1 << part.width) - 1) << (kind.SIZE * 8 - part.end)
        assert part.union or not taken & mask, part.name
        taken |= mask


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_sizes(name: str, size: int) -> None:
    kind: type[Struct] = getattr(devx, name)
    assert size == kind.SIZE


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_what_is_set_is_read_and_nothing_else_changes(kind: type[Struct], data: st.DataObject) -> None:
    fields = _numbers(kind)
    if not fields:
        pytest.skip("only structures inside")
    before = kind(random.Random(data.draw(st.integers(0, 1 << 32))).randbytes(kind.SIZE))
    field = data.draw(st.sampled_from(fields))
    value = data.draw(st.integers(0, (1 << field.width) - 1))
    after = kind(bytes(before))
    setattr(after, field.name, value)
    assert after[field.name] == getattr(after, field.name) == value
    shift = kind.SIZE * 8 - field.end
    mask = ((1 << field.width) - 1) << shift
    old, new = (int.from_bytes(bytes(struct), "big") for struct in (before, after))
    assert new & ~mask == old & ~mask
    assert (new & mask) >> shift == value
    assert (after == before) == (new == old)


@pytest.mark.parametrize(("where", "bits"), POSITIONS.items(), ids=lambda x: x[1] if isinstance(x[1], str) else "")
def test_positions(where: tuple[type[Struct], str], bits: tuple[int, int]) -> None:
    kind, name = where
    struct = kind(bytes(kind.SIZE))
    struct[name] = (1 << bits[1]) - 1
    value = int.from_bytes(bytes(struct), "big")
    assert value == ((1 << bits[1]) - 1) << (kind.SIZE * 8 - bits[0] - bits[1])


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_values_out_of_range(kind: type[Struct]) -> None:
    struct = kind()
    for field in _numbers(kind):
        for wrong in (-1, 1 << field.width):
            with pytest.raises(UsageError, match=field.name):
                setattr(struct, field.name, wrong)
        with pytest.raises(UsageError, match=field.name):
            setattr(struct, field.name, "1")
    assert struct == kind()


def test_commands_know_their_opcode() -> None:
    assert commands.QueryQpIn().opcode is devx.Opcode.QUERY_QP
    assert bytes(commands.QueryQpIn(qpn=0x123456)).hex() == "050b0000000000000012345600000000"
    assert commands.Init2InitQpIn().opcode == 0x50E
    assert commands.output_size(bytes(commands.QueryCqIn())) == 272
    assert commands.output_size(b"\xff\xff") == 16


def test_nested_structures_are_views() -> None:
    out = commands.QueryQpOut()
    out.qpc.state = devx.QpState.RTS
    out["qpc.primary_address_path.rgid_rip"] = bytes(range(16))
    assert out.qpc.primary_address_path.rgid_rip == bytes(range(16))
    assert out["qpc.state"] is devx.QpState.RTS
    copied = commands.QueryQpOut(qpc=out.qpc)
    assert copied.qpc == out.qpc
    out.qpc = {"state": 1, "mtu": 3}
    assert (out.qpc.state, out.qpc.mtu) == (1, 3)
    assert copied.qpc.state == 3
    with pytest.raises(UsageError, match="a Qpc"):
        out.qpc = contexts.Cqc()
    with pytest.raises(UsageError, match="16 bytes"):
        out["qpc.primary_address_path.rgid_rip"] = b"short"


def test_dictionary_and_dumps() -> None:
    qpc = contexts.Qpc(state=3, remote_qpn=0x1234, primary_address_path={"vhca_port_num": 1})
    whole = qpc.as_dict()
    assert whole["remote_qpn"] == 0x1234
    assert whole["primary_address_path"]["rgid_rip"] == "00" * 16
    assert set(whole) == set(qpc)
    assert "remote_qpn" in qpc
    assert "remote" not in qpc
    assert qpc.dump().splitlines() == [
        "state: RTS (3)",
        "remote_qpn: 4660 (0x1234)",
        "primary_address_path:",
        "  vhca_port_num: 1",
    ]
    assert len(qpc.dump(zeros=True).splitlines()) > 60
    assert qpc.hex().splitlines()[0] == "0000  30000000 00000000 00000000 00000000"
    assert repr(qpc) == "<Qpc state: RTS (3), remote_qpn: 4660 (0x1234), vhca_port_num: 1>"
    assert repr(contexts.Qpc()) == "<Qpc all zero>"
    assert qpc != contexts.Cqc()
    assert contexts.Qpc(bytes(qpc)) == qpc


def test_unknown_values_and_names() -> None:
    assert contexts.Qpc(state=8).state == 8
    assert not isinstance(contexts.Qpc(state=8).state, devx.QpState)
    for wrong in ("remote", "state.inner", "primary_address_path.remote"):
        with pytest.raises(KeyError):
            contexts.Qpc()[wrong]
    with pytest.raises(AttributeError, match="no field 'remote'"):
        contexts.Qpc().remote = 1  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        contexts.Qpc(remote=1)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_short_bytes(kind: type[Struct]) -> None:
    with pytest.raises(UsageError, match=str(kind.SIZE)):
        kind(b"\0" * (kind.SIZE - 1))


@given(st.lists(st.integers(0, 0xFFFFFF), max_size=20))
def test_lists_at_the_end(numbers: list[int]) -> None:
    command = commands.ModifyRqtIn(rqtn=7, rq_num=numbers)
    assert len(command) == 272 + 4 * len(numbers)
    assert command.rq_num == numbers
    assert commands.ModifyRqtIn(bytes(command)).rq_num == numbers
    assert command.rqtn == 7


def test_a_list_of_what_does_not_fit() -> None:
    with pytest.raises(UsageError, match="24 bits"):
        commands.ModifyRqtIn(rq_num=[1 << 24])
    with pytest.raises(UsageError, match="inside another is fixed"):
        commands.ModifyRqtIn().ctx.rq_num = [1]


class _Inner(Struct, size=2):
    value = Field(0, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": Field(0, 8), "b": Field(7, 2)}, "overlaps a"),
        ({"a": Field(30, 4)}, "ends at bit 0x22"),
        ({"as_dict": Field(0, 1)}, "the name is taken"),
        ({"a": Nested(0, _Inner), "b": Raw(8, 1)}, "overlaps a"),
    ],
)
def test_wrong_descriptions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type(Struct)("Wrong", (Struct,), fields, size=4)


@pytest.mark.parametrize(
    "make", [lambda: Field(0, 0), lambda: Field(0, 65), lambda: Raw(4, 1), lambda: Nested(1, _Inner)]
)
def test_wrong_fields(make: Any) -> None:
    with pytest.raises(TypeError):
        make()


def test_unions_may_overlap() -> None:
    kind: Any = type(Struct)("Union", (Struct,), {"a": Field(0, 8), "b": Field(0, 4, union=True)}, size=1)
    assert kind(a=0xF0).b == 0xF
    assert isinstance(contexts.Rqtc.rq_num, Array)


def test_devx_error() -> None:
    error = DevxError("mlx5dv_devx_qp_query", 0x50B, "QUERY_QP", 0x10, "BAD_QP_STATE: wrong state", 0x1234)
    assert isinstance(error, VerbsError)
    assert isinstance(error, OSError)
    assert error.errno == 121
    for part in ("mlx5dv_devx_qp_query", "QUERY_QP", "0x50b", "BAD_QP_STATE", "0x1234"):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.opcode, copy.status, copy.syndrome) == (0x50B, 0x10, 0x1234)


def test_statuses_have_words() -> None:
    assert all(status.text for status in devx.Status)
    assert devx.Status(0x50).text == "the input is too short for the command"
    assert devx.opcode_name(0x50B) == "QUERY_QP"
    assert devx.opcode_name(0xFFF) == "command 0xfff"
