"""What both sides must agree on: slots of memory, messages, and what the server says when a client connects."""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib
from dataclasses import dataclass

from aiordma import RemoteBuffer

KEY_BYTES = 64
WINDOW = 4  # receives that each side keeps posted; a client has one request on the way


class LayoutError(Exception):
    """The other side speaks another version of this, or something else."""


def hash_of(key: bytes) -> int:
    """64 bits that stand for a key in a slot's header."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


# ---------------------------------------------------------------- slots

# version, hash of the key, length of the value, checksum of those and the value
_HEADER = struct.Struct("!QQII")
HEADER = _HEADER.size
_COVERED = struct.Struct("!QQI")


def seal(version: int, key: bytes, value: bytes | memoryview) -> bytes:
    """The header of a slot with that value in it."""
    covered = _COVERED.pack(version, hash_of(key), len(value))
    return covered + struct.pack("!I", zlib.crc32(value, zlib.crc32(covered)))


def unseal(slot: bytes | memoryview, version: int, key: bytes) -> bytes | None:
    """The value, or None where the slot holds anything else: another key or version, or parts of two.

    A one-sided read isn't atomic: it may see a slot that is being written. The checksum tells.
    """
    found_version, found_key, length, checksum = _HEADER.unpack_from(slot)
    if found_version != version or found_key != hash_of(key) or length > len(slot) - HEADER:
        return None
    value = bytes(slot[HEADER : HEADER + length])
    covered = _COVERED.pack(found_version, found_key, length)
    return value if zlib.crc32(value, zlib.crc32(covered)) == checksum else None


# ---------------------------------------------------------------- messages


class Op(enum.IntEnum):
    """What a client asks for."""

    LOOKUP = 1  # where is it?
    RESERVE = 2  # where may it go?
    COMMIT = 3  # it's there
    DELETE = 4
    COUNT = 5  # how many values are there?


class Status(enum.IntEnum):
    """What the server answers."""

    OK = 0
    NOT_FOUND = 1
    FULL = 2  # every slot is being written at the moment
    REFUSED = 3  # a request that makes no sense


# op or status, length of the key, number of the request, slot, length of the value, version, key
_MESSAGE = struct.Struct(f"!BBxxIIIQ{KEY_BYTES}s")
MESSAGE = _MESSAGE.size


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer."""

    code: int
    number: int
    slot: int = 0
    length: int = 0
    version: int = 0
    key: bytes = b""

    def pack(self) -> bytes:
        return _MESSAGE.pack(self.code, len(self.key), self.number, self.slot, self.length, self.version, self.key)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Message:
        try:
            code, key_length, number, slot, length, version, key = _MESSAGE.unpack(data)
        except struct.error as e:
            raise LayoutError(f"a message of {len(data)} bytes") from e
        return cls(code, number, slot, length, version, key[: min(key_length, KEY_BYTES)])


# ---------------------------------------------------------------- greeting

_MAGIC = b"kvc1"
_GREETING = struct.Struct("!4sII")


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the server's acceptance says, in its private data: the shape of the memory, and its address and key."""

    slots: int
    slot_bytes: int
    memory: RemoteBuffer

    def pack(self) -> bytes:
        return _GREETING.pack(_MAGIC, self.slots, self.slot_bytes) + self.memory.to_bytes()

    @classmethod
    def unpack(cls, data: bytes) -> Greeting:
        magic, slots, slot_bytes = _GREETING.unpack_from(data)
        if magic != _MAGIC:
            raise LayoutError("this is no cache, or one of another version")
        # Private data comes with zero bytes behind it.
        rest = data[_GREETING.size :]
        return cls(slots, slot_bytes, RemoteBuffer.from_bytes(rest[: len(RemoteBuffer(0, 0, 0).to_bytes())]))

    def slot(self, number: int) -> RemoteBuffer:
        """A slot in the server's memory."""
        return self.memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]
