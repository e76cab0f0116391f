"""TMA descriptors: what the hardware needs to know of a tensor to copy blocks of it, 128 bytes each.

A descriptor is made by the driver and travels by value. It is kept as long as nothing moved: address, lengths
and strides decide it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

from flexc import driver
from flexc.codegen.arguments import Argument, Source
from flexc.lru import LRU

SIZE = 128
"""Bytes of a descriptor; it lies at a multiple of 64."""
RANK = 4
# Of the driver's header: element types, no interleaving, swizzles of 128 bytes, L2 lines of 128 bytes.
_ELEMENT_TYPE = {"fp16": 6, "bf16": 9}
_PLAIN, _SWIZZLE_128, _L2_128, _ZERO_FILL = 0, 3, 2, 0
_SWIZZLE_BYTES = 128
_ITEM = 2

_TENSORS = {
    Source.Q_DESCRIPTOR: (Source.Q, Source.Q_STRIDE, Source.Q_LEN),
    Source.K_DESCRIPTOR: (Source.K, Source.K_STRIDE, Source.KV_LEN),
    Source.V_DESCRIPTOR: (Source.V, Source.V_STRIDE, Source.KV_LEN),
    Source.OUT_DESCRIPTOR: (Source.OUT, Source.OUT_STRIDE, Source.Q_LEN),
}


def is_descriptor(argument: Argument) -> bool:
    """Whether the value of an argument is a descriptor, which a launcher makes from the others."""
    return argument.source in _TENSORS


class TensorMaps:
    """The descriptors of one kernel's tensors, from the values of its other arguments."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._made: LRU[tuple[object, ...], tuple[bytes, ...]] = LRU(256)
        at = {(a.source, a.dimension): i for i, a in enumerate(arguments) if not is_descriptor(a)}
        self._which = []
        for argument in filter(is_descriptor, arguments):
            pointer, stride, length = _TENSORS[argument.source]
            facts = [at[pointer, 0], *(at[stride, d] for d in range(RANK - 1)), at[length, 0]]
            shares_heads = length is Source.KV_LEN
            self._which.append((argument, tuple(facts), shares_heads))
        counted = (Source.BATCH, Source.Q_HEADS, Source.GROUP)
        self._counts = tuple(at[source, 0] for source in counted) if self._which else ()
        self._decisive = tuple(sorted({*self._counts, *(i for _, facts, _ in self._which for i in facts)}))

    def values(self, values: Sequence[Any]) -> tuple[bytes, ...]:
        """The descriptors in the order of the arguments. `values` are those of all other arguments."""
        key = tuple(values[i] for i in self._decisive)
        found = self._made.get(key)
        if found is None:
            batch, heads, group = (values[i] for i in self._counts)
            found = tuple(
                _encode(argument, [values[i] for i in facts], batch, heads // group if shared else heads)
                for argument, facts, shared in self._which
            )
            self._made.put(key, found)
        return found


def _encode(argument: Argument, facts: Sequence[int], batch: int, heads: int) -> bytes:
    """The descriptor of a tensor (batch, heads, length, columns), of which blocks are copied."""
    address, *strides, length = facts
    element, rows = _block(argument)
    # The driver counts dimensions from the innermost. A dimension of length 1 may have any stride.
    lengths = (argument.dimension, length, heads, batch)
    steps = [_ITEM * (s if n > 1 else 8) for s, n in zip(reversed(strides), lengths[1:], strict=True)]
    box = (_SWIZZLE_BYTES // _ITEM, rows, 1, 1)
    # The driver wants the descriptor itself at a multiple of 64 bytes.
    room = ctypes.create_string_buffer(SIZE + 64)
    start = -ctypes.addressof(room) % 64
    status = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + start),
        _ELEMENT_TYPE[element],
        RANK,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * RANK)(*lengths),
        (ctypes.c_uint64 * (RANK - 1))(*steps),
        (ctypes.c_uint32 * RANK)(*box),
        (ctypes.c_uint32 * RANK)(*(1,) * RANK),
        _PLAIN,
        _SWIZZLE_128,
        _L2_128,
        _ZERO_FILL,
    )
    driver.check(status, f"a TMA descriptor of lengths {lengths} and strides {steps} in bytes")
    return room.raw[start : start + SIZE]


def _block(argument: Argument) -> tuple[str, int]:
    """Element type and rows of the block that a descriptor's type names."""
    found = re.match(r"tensordesc<(\w+)\[1, 1, (\d+), \d+\]", argument.type)
    if found is None:
        raise AssertionError(f"{argument.name} has the type {argument.type}")
    return found[1], int(found[2])
