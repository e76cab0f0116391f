"""The memory from which a kernel reads its parameters at a launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from flexc.artifact import Artifact
from flexc.codegen.arguments import Argument
from flexc.tensor_maps import SIZE, block_of, is_descriptor

_FORMAT = {"i32": "i", "i64": "q", "fp32": "f"}
_MAP = f"{SIZE}s"
_MAP_ALIGNMENT = 64
# Parameters that a kernel has and does not read: they take room, and no value.
_UNUSED = {"i": "4x", "q": "8x", "P": "8x"}


class Layout:
    """Where each parameter of a kernel lies."""

    def __init__(self, artifact: Artifact) -> None:
        formats = [item for a in artifact.arguments for item in _formats(a)]
        # Pointers of Triton's own, which this kernel does not use.
        formats += [_UNUSED["P"]] * (artifact.parameters - len(formats))
        items, self.offsets, end = list[str](), list[int](), 0
        for item in formats:
            start = -(-end // _alignment(item)) * _alignment(item)
            items.append(f"{start - end}x{item}")
            self.offsets.append(start)
            end = start + struct.calcsize(f"={item}")
        self.struct = struct.Struct("=" + "".join(items))
        self.size = end
        self.of_values = [at for at, f in zip(self.offsets, formats, strict=True) if "x" not in f]
        """Where the values lie: those that are no padding."""


class Block:
    """Room for the parameters of one launch at a time."""

    def __init__(self, layout: Layout) -> None:
        self._struct = layout.struct
        self.memory = ctypes.create_string_buffer(layout.size + _MAP_ALIGNMENT)
        self.start = -ctypes.addressof(self.memory) % _MAP_ALIGNMENT
        base = ctypes.addressof(self.memory) + self.start
        self.pointers = (ctypes.c_void_p * len(layout.offsets))(*(base + at for at in layout.offsets))

    def fill(self, values: Sequence[object]) -> None:
        """Write all values, in the order of the parameters."""
        self._struct.pack_into(self.memory, self.start, *values)


def _formats(argument: Argument) -> list[str]:
    """How the parameters of an argument are packed. A descriptor is followed by its lengths and strides."""
    if is_descriptor(argument):
        rank = len(block_of(argument)[1])
        return [_MAP, *[_UNUSED["i"]] * rank, *[_UNUSED["q"]] * rank]
    return ["Q" if argument.type.startswith("*") else _FORMAT[argument.type]]


def _alignment(item: str) -> int:
    return _MAP_ALIGNMENT if item == _MAP else struct.calcsize(f"={item}")
