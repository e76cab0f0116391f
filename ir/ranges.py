"""The closed form of a mask: per query row, a few ranges of keys, each an expression of the row."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.ir.expr import Expr


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
class Ranges:
    """All keys that a row may see lie in one of `ranges`, which may overlap.

    `open_parts` are the parts of the mask that no range could be found for, as formulas: with any, the ranges
    hold more pairs than the mask allows, and tiles inside them must still be looked at.
    """

    ranges: tuple[Range, ...]
    open_parts: tuple[Expr, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether a row sees exactly the union of its ranges."""
        return not self.open_parts and all(r.is_exact for r in self.ranges)
