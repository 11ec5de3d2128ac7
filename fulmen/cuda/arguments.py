"""A kernel's arguments, described once: Python packs them, and writes the C struct the kernel reads.

A kernel takes one struct by value, `Args`. Its launcher lists the fields as C declares them; `declaration` is the text
that is put in front of the kernel's source, with a check of the size, and `bind` makes the packer of a launch.

    ARGUMENTS = Struct("Args", ("q", "const char *"), ("q_strides", STRIDES), ("factor", "float"))
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

CODES = {"int": "i", "float": "f", "long long": "q"}  # in the words of the module struct; pointers: Q
TENSOR_MAP = "struct alignas(64) TensorMap { unsigned long long opaque[16]; };"


class Field(NamedTuple):
    name: str
    type: str | Struct
    length: int | None = None  # of an array

    def declaration(self) -> str:
        name = self.name if self.length is None else f"{self.name}[{self.length}]"
        return f"{self.type if isinstance(self.type, str) else self.type.name} {name};"


class Struct:
    """A C struct: what it looks like, where its fields lie, how they are packed."""

    def __init__(self, name: str, *fields: tuple[Any, ...], align: int = 1) -> None:
        self.name, self.align = name, align
        self.fields = tuple(Field(*field) for field in fields)
        self.offsets, formats, end = {}, [], 0
        for field in self.fields:
            code, size, alignment = layout(field.type)
            gap = -end % alignment
            count = 1 if field.length is None else field.length
            self.offsets[field.name] = end + gap
            formats.append(f"{gap}x" * (gap > 0) + code * count)
            end += gap + size * count
            self.align = max(self.align, alignment)
        self.formats = tuple(formats)
        self.size = end + -end % self.align
        self.padding = self.size - end

    def __repr__(self) -> str:
        return f"Struct({self.name}, {self.size} bytes)"

    def declaration(self) -> str:
        """The struct in C, after those it is made of."""
        parts = dict.fromkeys(field.type for field in self.fields if isinstance(field.type, Struct))
        body = " ".join(field.declaration() for field in self.fields)
        check = f'static_assert(sizeof({self.name}) == {self.size}, "{self.name}, as Python packs it");'
        return "\n".join(
            [*(x.declaration() for x in parts), f"struct alignas({self.align}) {self.name} {{ {body} }};", check]
        )

    def packer(self, count: int | None = None) -> struct.Struct:
        """Packs the first `count` fields, or all of them."""
        return struct.Struct("=" + "".join(self.formats[:count]))

    def bind(self, constants: dict[str, Any]) -> tuple[struct.Struct, bytes]:
        """The packer of the fields a call brings, and the whole struct with `constants`, its last fields, packed."""
        names = [field.name for field in self.fields]
        first = len(names) - len(constants)
        if names[first:] != list(constants):
            raise ValueError(f"{self.name} ends with {', '.join(names[first:])}, not with {', '.join(constants)}")
        front = self.packer(first)
        values = [x for value in constants.values() for x in (value if isinstance(value, tuple) else (value,))]
        rest = struct.pack("=" + "".join(self.formats[first:]), *values)
        return front, bytes(front.size) + rest + bytes(self.padding)


def layout(type_: str | Struct) -> tuple[str, int, int]:
    """How a C type is packed, its size and its alignment."""
    if isinstance(type_, Struct):
        return "".join(type_.formats) + f"{type_.padding}x" * (type_.padding > 0), type_.size, type_.align
    if type_ == "TensorMap":
        return "128s", 128, 64
    code = "Q" if type_.endswith("*") else CODES[type_]
    return code, struct.calcsize("=" + code), struct.calcsize("=" + code)


STRIDES = Struct("Strides", ("b", "long long"), ("h", "long long"), ("n", "long long"))  # of batch, head, row; bytes
