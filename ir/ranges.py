"""The closed form of a mask: per query row, a few ranges of keys, each an expression of the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.ir.expr import Expr

# Positions at and beyond this have no closed form: sums of a few of them stay inside 32 bits.
LONGEST = 2**29


@dataclass(frozen=True, slots=True)
class Range:
    """The keys `first <= kv_idx < end` of one query row; none where `first >= end`.

    All four are int32 expressions of the row: they read `b`, `h`, `q_idx`, lengths, captured numbers, and
    captured tensors at indices of the row, never `kv_idx`. Between `full_first` and `full_end`, which lie
    inside the range, every pair is allowed; a range that is exact has them equal to `first` and `end`.
    They may lie outside the keys: whoever uses them clips them to `0 .. kv_len`.
    """

    first: Expr
    end: Expr
    full_first: Expr
    full_end: Expr

    @property
    def is_exact(self) -> bool:
        """Whether the row sees the whole range."""
        return (self.first, self.end) == (self.full_first, self.full_end)


@dataclass(frozen=True, slots=True)
class Within:
    """What a closed form takes for granted: `least <= the captured number in slot <= greatest`.

    With `reach`, also that no key lies at or beyond `reach` times the number.
    """

    slot: int
    least: int
    greatest: int
    reach: int = 0

    def holds(self, value: int | float, kv_len: int) -> bool:
        """Whether a call with this number, and keys before `kv_len`, may use the closed form."""
        return self.least <= value <= self.greatest and (not self.reach or kv_len <= self.reach * value)


@dataclass(frozen=True, slots=True)
class Ranges:
    """All keys that a row may see lie in one of `ranges`.

    `open_parts` are the parts of the mask that no range could be found for, as formulas: with any, the ranges
    hold more pairs than the mask allows, and tiles inside them must still be looked at.

    Ranges may overlap. `is_sorted`: in every row they begin in ascending order, empty ones included, so that
    those of a tile of rows do too. All of it is true only of calls that `holds` accepts.
    """

    ranges: tuple[Range, ...]
    open_parts: tuple[Expr, ...] = ()
    is_sorted: bool = False
    requires: tuple[Within, ...] = ()
    longest: int = LONGEST

    @property
    def is_exact(self) -> bool:
        """Whether a row sees exactly the union of its ranges."""
        return not self.open_parts and all(r.is_exact for r in self.ranges)

    def holds(self, values: Sequence[object], q_len: int, kv_len: int) -> bool:
        """Whether the ranges are those of a call: `values` are the captures by slot. Microseconds.

        Only captured Python numbers are looked at, never tensors.
        """
        if q_len > LONGEST or kv_len > self.longest:
            return False
        for within in self.requires:
            value = values[within.slot]
            if not isinstance(value, int | float) or not within.holds(value, kv_len):
                return False
        return True
