"""Reading callgrind's profiles: how many instructions each part of the program took.

The format is in the manual's chapter "Callgrind Format Specification": lines `ob=(id) name` say whose code the cost lines
that follow are, and the cost line after a `calls=` line is what the called function took, all in all.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: The function below which everything is the emulated device's, the C library's part too.
DEVICE = "device_step"

#: Layers, and the objects that are theirs.
LAYERS = {
    "device": r"libaiordma_emulator",
    "libmlx5": r"libmlx5|libibverbs",
    "aiordma": r"/aiordma/_\w+\.cpython",
    "C library": r"/libc\.so|/libc-|/ld-linux|/libpthread|/libm\.so|vgpreload",
    "loop": r"/uvloop/|/_asyncio\.",
    "C loop": r"libcounted",
    "Python": r"",  # the interpreter and whatever else
}


@dataclass
class Profile:
    """Instructions of one workload, by layer."""

    name: str
    layers: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.layers.values())


def layer_of(path: str) -> str:
    return next(name for name, pattern in LAYERS.items() if re.search(pattern, path))


def read(path: Path) -> Profile | None:
    """The profile in one file; None where it's of no workload (callgrind writes one at the end, too)."""
    objects: dict[str, str] = {}
    functions: dict[str, str] = {}
    layers: Counter[str] = Counter()
    name = None
    current = "Python"
    called = ""
    skip = False
    device = 0

    def lookup(known: dict[str, str], value: str) -> str:
        match = re.match(r"\((\d+)\)(?: (.*))?", value)
        if match is None:
            return value
        number, text = match.groups()
        if text is not None:
            known[number] = text
        return known[number]

    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("desc: Trigger: Client Request: "):
            name = line.rpartition(": ")[2]
        key, equals, value = line.partition("=")
        if equals and key == "ob":
            current = layer_of(lookup(objects, value))
        elif equals and key == "cob":
            lookup(objects, value)
        elif equals and key == "fn":
            lookup(functions, value)
        elif equals and key == "cfn":
            called = lookup(functions, value)
        elif equals and key == "calls":
            skip = True
        elif line[:1] in "0123456789+-*" and line:
            cost = int(line.split()[1]) if " " in line else 0
            if not skip:
                layers[current] += cost
            elif called == DEVICE:
                device += cost
            skip = False
    if name is None:
        return None
    # What the device had the C library do counts as its own.
    borrowed = device - layers["device"]
    layers["C library"] -= borrowed
    layers["device"] = device
    return Profile(name, layers)
