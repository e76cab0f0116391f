"""Masks whose rows see a narrow band of keys that moves on with the rows, such as a window.

How narrow is known of a call: the width of a window is often a captured number, which kernels do not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flexc.codegen.blocks import exact_ranges
from flexc.codegen.signed_terms import signed_terms
from flexc.ir.build import input_
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType

BAND_TILE = 64
"""Query rows of a tile, and keys of one."""

Lengths = tuple[int, int]
Numbers = tuple[int | None, ...]
"""Captured numbers by slot; None for what is none."""


class Band(NamedTuple):
    """What a band has at most: the tiles of keys that a tile of rows sees, and the keys that a row sees.

    Tiles begin at multiples of `BAND_TILE`. `steady`: from each row to the next, either end stays or moves on
    by one key; an end that has moved as far as the rows has moved at each of them.
    """

    tiles: int
    keys: int
    steady: bool


def band_of(mask: Expr | None, values: Sequence[object], lengths: Lengths | None) -> Band | None:
    """How narrow the band is that a mask lets through; None if nothing bounds that.

    Args:
        mask: of a call, or None.
        values: its captures by slot.
        lengths: (q_len, kv_len), or None for any.
    """
    if mask is None:
        return None
    numbers = tuple(x if isinstance(x, int) else None for x in values)
    return _band(mask, numbers, lengths)


class _Bound(NamedTuple):
    """`q_idx + rest + number`, where `rest` is the same for all rows of a head."""

    rest: frozenset[tuple[Expr, int]]
    number: int


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a call."""

    numbers: Numbers
    lengths: Lengths | None

    def number(self, term: Expr) -> int | None:
        """The value of a term, if it is known."""
        if term.op is Op.CONST and isinstance(term.attr, int):
            return term.attr
        if term.op is Op.SCALAR and isinstance(term.attr, int):
            return self.numbers[term.attr]
        if self.lengths is not None and term.op is Op.INPUT and term.attr in (Input.Q_LEN, Input.KV_LEN):
            return self.lengths[term.attr is Input.KV_LEN]
        return None

    def most(self, term: Expr) -> int | None:
        """The greatest value of a remainder, whose least is 0; None for another term."""
        if term.op is not Op.MOD:
            return None
        divisor = self.number(term.args[1])
        return divisor - 1 if divisor is not None and divisor > 0 else None


@lru_cache(maxsize=1024)
def _band(mask: Expr, numbers: Numbers, lengths: Lengths | None) -> Band | None:
    ranges = exact_ranges(mask)
    if ranges is None or len(ranges.ranges) != 1:
        return None
    (band,) = ranges.ranges
    if DType.I64 in (band.first.dtype, band.end.dtype):
        return None
    known = _Known(numbers, lengths)
    firsts = _bounds(band.first, Op.MAX, known)
    ends = _bounds(band.end, Op.MIN, known)
    pairs = [(first, ends[rest], not rest) for rest, first in firsts.items() if rest in ends]
    if not pairs:
        return None
    return Band(
        tiles=min(_tiles_of(*pair) for pair in pairs),
        keys=min(max(end - first, 0) for first, end, _ in pairs),
        steady=_is_steady(band.first, Op.MAX) and _is_steady(band.end, Op.MIN),
    )


def _is_steady(root: Expr, op: Op) -> bool:
    """Whether an end is the largest or least of what follows the rows, or is the same for all of a head."""
    for operand in _operands(root, op):
        moved = [(term, sign) for term, sign in signed_terms(operand) if Input.Q_IDX in inputs_of(term)]
        if moved and not (len(moved) == 1 and moved[0][0] is input_(Input.Q_IDX) and moved[0][1] == 1):
            return False
    return True


def _tiles_of(first: int, end: int, aligned: bool) -> int:
    """Of rows that see the keys `q_idx + first` to `q_idx + end`; not `aligned`: these, moved by a number."""
    last = BAND_TILE + end - 2
    if aligned:
        return max(last // BAND_TILE - first // BAND_TILE + 1, 1)
    # So many keys may begin anywhere in a tile.
    return max((last - first - 1) // BAND_TILE + 2, 2)


def _bounds(root: Expr, op: Op, known: _Known) -> dict[frozenset[tuple[Expr, int]], int]:
    """The operands of a minimum or maximum that follow the rows, by what they add besides a number.

    Of a maximum, the numbers are what is added at least; of a minimum, at most.
    """
    found: dict[frozenset[tuple[Expr, int]], int] = {}
    tighter = max if op is Op.MAX else min
    for operand in _operands(root, op):
        bound = _bound(operand, known, at_least=op is Op.MAX)
        if bound is not None:
            found[bound.rest] = tighter(found.get(bound.rest, bound.number), bound.number)
    return found


def _operands(node: Expr, op: Op) -> Iterator[Expr]:
    if node.op is op:
        for arg in node.args:
            yield from _operands(arg, op)
    else:
        yield node


def _bound(node: Expr, known: _Known, *, at_least: bool) -> _Bound | None:
    follows, number, rest = 0, 0, []
    for term, sign in signed_terms(node):
        value = known.number(term)
        most = known.most(term)
        if value is not None:
            number += sign * value
        elif most is not None:
            number += sign * most if at_least == (sign < 0) else 0
        elif term.op is Op.INPUT and term.attr is Input.Q_IDX:
            follows += sign
        elif Input.Q_IDX in inputs_of(term):
            return None
        else:
            rest.append((term, sign))
    # A term that is there twice is not worth a multiset.
    return _Bound(frozenset(rest), number) if follows == 1 and len(set(rest)) == len(rest) else None
