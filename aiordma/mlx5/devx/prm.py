"""Structures of the Programmer's Reference Manual, described once and then used by field name.

A structure is a class whose attributes are fields at bit positions, counted as mlx5_ifc.h counts them: from the most
significant bit of the first byte. An instance is a view of big-endian bytes::

    class Ads(Struct, size=44):
        pkey_index = Field(0x10, 16)
        rgid_rip = Raw(0x80, 16)

    path = Ads(pkey_index=1)
    path.pkey_index, path["pkey_index"], bytes(path), path.as_dict(), print(path.dump())

What a value doesn't fit into is an error, and so is a description whose fields overlap or lie outside.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from aiordma.errors import UsageError

__all__ = ["Array", "Field", "Nested", "Raw", "Struct"]

S = TypeVar("S", bound="Struct")


class _Part:
    """A field of any kind: ``offset`` and ``width`` in bits; ``union``: may share its place with others."""

    def __init__(self, offset: int, width: int, union: bool = False) -> None:
        self.offset = offset
        self.width = width
        self.union = union
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def end(self) -> int:
        return self.offset + self.width

    def read(self, struct: Struct) -> Any:
        raise NotImplementedError

    def write(self, struct: Struct, value: Any) -> None:
        raise NotImplementedError

    def plain(self, struct: Struct) -> Any:
        """The value as a dictionary shows it."""
        return self.read(struct)


class Field(_Part):
    """An unsigned number of 1 to 64 bits. With ``kind``, an IntEnum, known values read as its members."""

    def __init__(self, offset: int, width: int, kind: type[enum.IntEnum] | None = None, *, union: bool = False) -> None:
        if not 1 <= width <= 64:
            raise TypeError(f"a field has 1 to 64 bits, not {width}")
        super().__init__(offset, width, union)
        self.kind = kind
        self._first = offset // 8
        self._last = (offset + width + 7) // 8
        self._shift = self._last * 8 - offset - width
        self._mask = (1 << width) - 1

    @overload
    def __get__(self, struct: None, owner: type) -> Field: ...
    @overload
    def __get__(self, struct: Struct, owner: type) -> int: ...
    def __get__(self, struct: Struct | None, owner: type) -> Field | int:
        return self if struct is None else self.read(struct)

    def __set__(self, struct: Struct, value: int) -> None:
        self.write(struct, value)

    def read(self, struct: Struct) -> int:
        value = int.from_bytes(struct._memory[self._first : self._last], "big") >> self._shift & self._mask
        if self.kind is not None and value in self.kind._value2member_map_:
            return self.kind(value)
        return value

    def write(self, struct: Struct, value: int) -> None:
        if not isinstance(value, int):
            raise UsageError(f"{type(struct).__name__}.{self.name}: a whole number, not {value!r}")
        if not 0 <= value <= self._mask:
            raise UsageError(
                f"{type(struct).__name__}.{self.name} has {self.width} bits: 0 to {self._mask:#x}, not {value:#x}"
            )
        memory = struct._writable()
        whole = int.from_bytes(memory[self._first : self._last], "big")
        whole = whole & ~(self._mask << self._shift) | int(value) << self._shift
        memory[self._first : self._last] = whole.to_bytes(self._last - self._first, "big")


class Raw(_Part):
    """Bytes that aren't a number: a GID, a key. At a whole byte."""

    def __init__(self, offset: int, size: int, *, union: bool = False) -> None:
        if offset % 8:
            raise TypeError("raw bytes begin at a whole byte")
        super().__init__(offset, size * 8, union)
        self.size = size

    @overload
    def __get__(self, struct: None, owner: type) -> Raw: ...
    @overload
    def __get__(self, struct: Struct, owner: type) -> bytes: ...
    def __get__(self, struct: Struct | None, owner: type) -> Raw | bytes:
        return self if struct is None else self.read(struct)

    def __set__(self, struct: Struct, value: bytes) -> None:
        self.write(struct, value)

    def read(self, struct: Struct) -> bytes:
        at = self.offset // 8
        return bytes(struct._memory[at : at + self.size])

    def write(self, struct: Struct, value: bytes) -> None:
        if len(value) != self.size:
            raise UsageError(f"{type(struct).__name__}.{self.name}: {self.size} bytes, not {len(value)}")
        at = self.offset // 8
        struct._writable()[at : at + self.size] = value

    def plain(self, struct: Struct) -> str:
        return self.read(struct).hex()


class Nested(_Part, Generic[S]):
    """Another structure inside; reading gives a view, writing copies or takes a mapping of its fields."""

    def __init__(self, offset: int, kind: type[S], *, union: bool = False) -> None:
        if offset % 8:
            raise TypeError("a structure begins at a whole byte")
        super().__init__(offset, kind.SIZE * 8, union)
        self.kind = kind

    @overload
    def __get__(self, struct: None, owner: type) -> Nested[S]: ...
    @overload
    def __get__(self, struct: Struct, owner: type) -> S: ...
    def __get__(self, struct: Struct | None, owner: type) -> Nested[S] | S:
        return self if struct is None else self.read(struct)

    def __set__(self, struct: Struct, value: S | Mapping[str, Any]) -> None:
        self.write(struct, value)

    def read(self, struct: Struct) -> S:
        at = self.offset // 8
        return self.kind._view(struct._memory[at : at + self.kind.SIZE])

    def write(self, struct: Struct, value: S | Mapping[str, Any]) -> None:
        if isinstance(value, Mapping):
            value = self.kind(**value)
        if not isinstance(value, self.kind):
            raise UsageError(f"{type(struct).__name__}.{self.name}: a {self.kind.__name__}, not {value!r}")
        at = self.offset // 8
        struct._writable()[at : at + self.kind.SIZE] = bytes(value)

    def plain(self, struct: Struct) -> dict[str, Any]:
        return self.read(struct).as_dict()


class Array(_Part):
    """Numbers in 32-bit words from ``offset`` to the end of the bytes, as long as those are; of each the low bits."""

    def __init__(self, offset: int, width: int = 32) -> None:
        super().__init__(offset, 0)
        self.entry = width

    @overload
    def __get__(self, struct: None, owner: type) -> Array: ...
    @overload
    def __get__(self, struct: Struct, owner: type) -> list[int]: ...
    def __get__(self, struct: Struct | None, owner: type) -> Array | list[int]:
        return self if struct is None else self.read(struct)

    def __set__(self, struct: Struct, value: list[int]) -> None:
        self.write(struct, value)

    def read(self, struct: Struct) -> list[int]:
        memory = struct._memory
        mask = (1 << self.entry) - 1
        return [int.from_bytes(memory[at : at + 4], "big") & mask for at in range(self.offset // 8, len(memory) - 3, 4)]

    def write(self, struct: Struct, value: list[int]) -> None:
        at = self.offset // 8
        if any(not 0 <= number < 1 << self.entry for number in value):
            raise UsageError(f"{type(struct).__name__}.{self.name}: numbers of {self.entry} bits, not {value}")
        struct._resize(at + 4 * len(value))
        struct._writable()[at:] = b"".join(number.to_bytes(4, "big") for number in value)


class Struct:
    """Base of all structures; ``size`` in bytes, without an Array at its end."""

    SIZE: ClassVar[int] = 0
    FIELDS: ClassVar[dict[str, _Part]] = {}

    _memory: memoryview

    def __init_subclass__(cls, *, size: int | None = None) -> None:
        super().__init_subclass__()
        fields = dict(cls.FIELDS)
        fields.update((name, part) for name, part in vars(cls).items() if isinstance(part, _Part))
        cls.FIELDS = dict(sorted(fields.items(), key=lambda item: (item[1].offset, -item[1].width)))
        if size is not None:
            cls.SIZE = size
        _check(cls)

    def __init__(self, data: bytes | bytearray | memoryview | None = None, /, **values: Any) -> None:
        if data is None:
            memory = bytearray(self.SIZE)
        elif len(data) < self.SIZE:
            raise UsageError(f"{type(self).__name__} has {self.SIZE} bytes, not {len(data)}")
        else:
            memory = bytearray(data)
        self._memory = memoryview(memory)
        for name, value in values.items():
            self[name] = value

    @classmethod
    def _view(cls, memory: memoryview) -> Self:
        view = cls.__new__(cls)
        view._memory = memory
        return view

    def _writable(self) -> memoryview:
        return self._memory

    def _resize(self, size: int) -> None:
        """Only what owns its bytes can change their length: not a structure inside another."""
        if size == len(self._memory):
            return
        old = bytes(self._memory)
        owner: Any = self._memory.obj
        if len(owner) != len(self._memory):
            raise UsageError(f"{type(self).__name__}: the length of a structure inside another is fixed")
        self._memory = memoryview(bytearray(old[:size].ljust(size, b"\0")))

    # ---------------------------------------------------------------- as a mapping

    def _find(self, name: str) -> tuple[Struct, _Part]:
        head, _, rest = name.partition(".")
        part = self.FIELDS.get(head)
        if part is None:
            raise KeyError(f"{type(self).__name__} has no field {head!r}")
        if not rest:
            return self, part
        inner = part.read(self)
        if not isinstance(inner, Struct):
            raise KeyError(f"{type(self).__name__}.{head} is no structure")
        return inner._find(rest)

    def __getitem__(self, name: str) -> Any:
        """A field by name; ``"outer.inner"`` reaches into nested structures."""
        struct, part = self._find(name)
        return part.read(struct)

    def __setitem__(self, name: str, value: Any) -> None:
        struct, part = self._find(name)
        part.write(struct, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_memory" and name not in self.FIELDS:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.FIELDS)

    def __contains__(self, name: object) -> bool:
        return name in self.FIELDS

    def as_dict(self) -> dict[str, Any]:
        """All fields: numbers, hex text for raw bytes, dictionaries for structures, lists."""
        return {name: part.plain(self) for name, part in self.FIELDS.items()}

    # ---------------------------------------------------------------- as bytes

    def __bytes__(self) -> bytes:
        return bytes(self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Struct) or type(other) is not type(self):
            return NotImplemented
        return bytes(self) == bytes(other)

    __hash__ = None  # type: ignore[assignment]  # its bytes change

    def hex(self) -> str:
        """The bytes, 16 a line, with their offset."""
        data = bytes(self)
        return "\n".join(f"{at:04x}  {data[at : at + 16].hex(' ', 4)}" for at in range(0, len(data), 16))

    def dump(self, *, zeros: bool = False) -> str:
        """The fields, a line each; those that are 0 only with ``zeros``."""
        return "\n".join(self._lines("", zeros))

    def _lines(self, indent: str, zeros: bool) -> Iterator[str]:
        for name, part in self.FIELDS.items():
            value = part.read(self)
            if isinstance(value, Struct):
                inner = list(value._lines(indent + "  ", zeros))
                if inner:
                    yield f"{indent}{name}:"
                    yield from inner
            elif zeros or (any(value) if isinstance(value, bytes) else value):
                yield f"{indent}{name}: {_text(value)}"

    def __repr__(self) -> str:
        set_fields = ", ".join(line.strip() for line in self._lines("", False) if not line.endswith(":"))
        return f"<{type(self).__name__} {set_fields}>" if set_fields else f"<{type(self).__name__} all zero>"


def _text(value: Any) -> str:
    if isinstance(value, enum.IntEnum):
        return f"{value.name} ({int(value)})"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return str(value)
    return f"{value} ({value:#x})" if value > 9 else str(value)


def _check(cls: type[Struct]) -> None:
    """A description that can't be right is found when it's written."""
    end = 0
    last = ""
    for name, part in cls.FIELDS.items():
        if part.end > cls.SIZE * 8:
            raise TypeError(f"{cls.__name__}.{name} ends at bit {part.end:#x} of {cls.SIZE * 8:#x}")
        if name in vars(Struct):
            raise TypeError(f"{cls.__name__}.{name}: the name is taken")
        if not part.union:
            if part.offset < end:
                raise TypeError(f"{cls.__name__}.{name} overlaps {last}")
            end, last = part.end, name
