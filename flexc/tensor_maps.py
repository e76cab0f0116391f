"""TMA descriptors: what the hardware needs to know of a tensor to copy blocks of it, 128 bytes each.

A descriptor is made by the driver and travels by value. Address, lengths and strides decide it. It is kept
for the next call; where only the address is another, as that of a result is, only that is replaced.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any

from flexc import driver
from flexc.codegen.arguments import Argument, Source
from flexc.codegen.backward_spec import ROWS_PADDED_TO
from flexc.lru import LRU

SIZE = 128
"""Bytes of a descriptor; it lies at a multiple of 64."""
RANK = 4
# Of the driver's header: element types, no interleaving, L2 lines of 128 bytes, swizzles by their bytes.
_ELEMENT_TYPE = {"fp16": 6, "fp32": 7, "bf16": 9}
_PLAIN, _L2_128, _ZERO_FILL = 0, 2, 0
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_ITEM = 2
_ALIGNMENT = 64
_FORMS = 256
"""Of one tensor: more lengths and strides than this are seldom alive together."""

_TENSORS = {
    Source.Q_DESCRIPTOR: (Source.Q, Source.Q_STRIDE, Source.Q_LEN),
    Source.K_DESCRIPTOR: (Source.K, Source.K_STRIDE, Source.KV_LEN),
    Source.V_DESCRIPTOR: (Source.V, Source.V_STRIDE, Source.KV_LEN),
    Source.OUT_DESCRIPTOR: (Source.OUT, Source.OUT_STRIDE, Source.Q_LEN),
    Source.GRAD_OUT_DESCRIPTOR: (Source.GRAD_OUT, Source.GRAD_OUT_STRIDE, Source.Q_LEN),
    Source.GRAD_Q_DESCRIPTOR: (Source.GRAD_Q, Source.GRAD_Q_STRIDE, Source.Q_LEN),
    Source.GRAD_K_DESCRIPTOR: (Source.GRAD_K, Source.GRAD_K_STRIDE, Source.KV_LEN),
    Source.GRAD_V_DESCRIPTOR: (Source.GRAD_V, Source.GRAD_V_STRIDE, Source.KV_LEN),
}
# What a backward knows of every row, contiguous and padded: numbers, pairs, or rows of sums in lines of 32.
_ROWS = {
    Source.DELTA_DESCRIPTOR: (Source.DELTA, Source.Q_LEN),
    Source.SHIFT_DESCRIPTOR: (Source.SHIFT, Source.Q_LEN),
    Source.GRAD_Q_SUM_DESCRIPTOR: (Source.GRAD_Q_SUM, Source.Q_LEN),
    Source.Q_PAIRS_DESCRIPTOR: (Source.Q_PAIRS, Source.Q_LEN),
    Source.K_PAIRS_DESCRIPTOR: (Source.K_PAIRS, Source.KV_LEN),
    Source.V_PAIRS_DESCRIPTOR: (Source.V_PAIRS, Source.KV_LEN),
    Source.GRAD_OUT_PAIRS_DESCRIPTOR: (Source.GRAD_OUT_PAIRS, Source.Q_LEN),
    Source.Q_UNIT_DESCRIPTOR: (Source.Q_UNIT, Source.Q_LEN),
    Source.K_UNIT_DESCRIPTOR: (Source.K_UNIT, Source.KV_LEN),
    Source.V_UNIT_DESCRIPTOR: (Source.V_UNIT, Source.KV_LEN),
    Source.GRAD_OUT_UNIT_DESCRIPTOR: (Source.GRAD_OUT_UNIT, Source.Q_LEN),
}
_LINE = 32


def is_descriptor(argument: Argument) -> bool:
    """Whether the value of an argument is a descriptor, which a launcher makes from the others."""
    return argument.source in _TENSORS or argument.source in _ROWS


class TensorMaps:
    """The descriptors of one kernel's tensors, from the values of its other arguments."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        at = {(a.source, a.dimension): i for i, a in enumerate(arguments) if not is_descriptor(a)}
        counts = [at[source, 0] for source in (Source.BATCH, Source.Q_HEADS, Source.GROUP)]
        self._maps = []
        for argument in filter(is_descriptor, arguments):
            if argument.source in _ROWS:
                pointer, length = _ROWS[argument.source]
                facts = (at[pointer, 0], at[length, 0], *counts)
                encode = _encode_rows if length is Source.Q_LEN else _encode_rows_of_keys
                self._maps.append(_Map(argument, facts, encode))
                continue
            pointer, stride, length = _TENSORS[argument.source]
            facts = (at[pointer, 0], *(at[stride, d] for d in range(RANK - 1)), at[length, 0], *counts)
            encode = _encode_shared if length is Source.KV_LEN else _encode
            encode = _encode_packed if len(block_of(argument)[1]) > RANK else encode
            self._maps.append(_Map(argument, facts, encode))

        self.addresses = frozenset(found.address for found in self._maps)
        """Of the arguments, the addresses of the tensors that are described."""

    def __len__(self) -> int:
        return len(self._maps)

    def values(self, values: Sequence[Any], device: int) -> tuple[bytes, ...]:
        """The descriptors in the order of the arguments. `values` are those of all other arguments."""
        return tuple([found.value(values, device) for found in self._maps])


Encode = Callable[[Argument, int, Sequence[int]], "ctypes.Array[ctypes.c_char]"]


class _Map:
    """The descriptors of one tensor: of each place where it lay, and one of each form to move elsewhere."""

    def __init__(self, argument: Argument, facts: tuple[int, ...], encode: Encode) -> None:
        """`facts` says which other arguments decide it, the address first."""
        self.address = facts[0]
        self._argument = argument
        self._facts = itemgetter(*facts)
        self._encode = encode
        self._made: LRU[tuple[int, ...], bytes] = LRU(256)
        self._forms: dict[tuple[int, ...], ctypes.Array[ctypes.c_char]] = {}
        self._lock = Lock()

    def value(self, values: Sequence[Any], device: int) -> bytes:
        """The descriptor for these values of the arguments."""
        key = self._facts(values)
        found = self._made.get(key)
        if found is None:
            driver.ensure_context(device)
            with self._lock:
                found = self._moved(key[0], key[1:])
            self._made.put(key, found)
        return found

    def _moved(self, address: int, facts: tuple[int, ...]) -> bytes:
        form = self._forms.get(facts)
        if form is None:
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            form = self._forms[facts] = self._encode(self._argument, address, facts)
        at = ctypes.c_void_p(_start(form))
        driver.check(
            driver.library().cuTensorMapReplaceAddress(at, ctypes.c_void_p(address)),
            "moving a TMA descriptor",
        )
        return ctypes.string_at(at, SIZE)


def _start(room: ctypes.Array[ctypes.c_char]) -> int:
    """The driver wants a descriptor at a multiple of 64 bytes."""
    address = ctypes.addressof(room)
    return address + -address % _ALIGNMENT


def _encode(argument: Argument, address: int, facts: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    """The descriptor of a tensor (batch, query heads, length, columns), of which blocks are copied."""
    *strides, length, batch, heads, _ = facts
    return _encode_tensor(argument, address, strides, (argument.dimension, length, heads, batch))


def _encode_shared(argument: Argument, address: int, facts: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    """The same of one (batch, heads of keys, length, columns)."""
    *strides, length, batch, heads, group = facts
    return _encode_tensor(argument, address, strides, (argument.dimension, length, heads // group, batch))


def _encode_packed(argument: Argument, address: int, facts: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    """That of `_encode`, whose heads are two dimensions: groups, and the heads of one."""
    of_batch, of_head, of_row, length, batch, heads, group = facts
    lengths = (argument.dimension, length, group, heads // group, batch)
    return _encode_tensor(argument, address, (of_batch, of_head * group, of_head, of_row), lengths)


def _encode_tensor(
    argument: Argument, address: int, strides: Sequence[int], lengths: tuple[int, ...]
) -> ctypes.Array[ctypes.c_char]:
    # The driver counts dimensions from the innermost. A dimension of length 1 may have any stride.
    steps = [_ITEM * (s if n > 1 else 8) for s, n in zip(reversed(strides), lengths[1:], strict=True)]
    element, block, swizzle = block_of(argument)
    box = (swizzle // _ITEM, *block[-2::-1])
    return _described(element, address, lengths, steps, box, swizzle)


def _encode_rows(argument: Argument, address: int, facts: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    """The descriptor of a number a row of all heads; of pairs, or sums in lines: `dimension` a row."""
    length, batch, heads, _ = facts
    rows = batch * heads * (-(-length // ROWS_PADDED_TO) * ROWS_PADDED_TO)
    element, block, swizzle = block_of(argument)
    if len(block) == 1:
        return _described(element, address, (rows,), (), block, swizzle)
    if element == "fp16":
        box, steps = (swizzle // _ITEM, block[0]), (_ITEM * argument.dimension,)
        return _described(element, address, (argument.dimension, rows), steps, box, swizzle)
    lengths = (_LINE, rows * argument.dimension // _LINE)
    return _described(element, address, lengths, (4 * _LINE,), block[::-1], swizzle)


def _encode_rows_of_keys(
    argument: Argument, address: int, facts: Sequence[int]
) -> ctypes.Array[ctypes.c_char]:
    """The same of the rows of all heads of keys."""
    length, batch, heads, group = facts
    return _encode_rows(argument, address, (length, batch, heads // group, 1))


def _described(
    element: str,
    address: int,
    lengths: Sequence[int],
    steps: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> ctypes.Array[ctypes.c_char]:
    """All but the address and the last four from the innermost dimension; `steps` are strides in bytes."""
    rank = len(lengths)
    room = ctypes.create_string_buffer(SIZE + _ALIGNMENT)
    status = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(_start(room)),
        _ELEMENT_TYPE[element],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*lengths),
        (ctypes.c_uint64 * max(1, rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        _PLAIN,
        _SWIZZLES[swizzle],
        _L2_128,
        _ZERO_FILL,
    )
    driver.check(status, f"a TMA descriptor of lengths {lengths} and strides {steps} in bytes")
    return room


def block_of(argument: Argument) -> tuple[str, tuple[int, ...], int]:
    """Element type, shape, and bytes of a swizzle, of the block that a descriptor's type names."""
    found = re.match(r"tensordesc<(\w+)\[([\d, ]+)\],.*swizzle_byte_width=(\d+)", argument.type)
    if found is None:
        raise AssertionError(f"{argument.name} has the type {argument.type}")
    return found[1], tuple(map(int, found[2].split(","))), int(found[3])
