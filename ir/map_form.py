"""A mask as the kernel that builds block maps takes it: ranges of keys, conditions on keys, the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

from flexc.ir.build import FALSE, const, input_, logic
from flexc.ir.closed_form import closed_form
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.graph import Capture
from flexc.ir.id_runs import IdRuns, closed_form_with_runs
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import Range, Ranges
from flexc.ir.split import conjuncts
from flexc.ir.types import DType


@dataclass(frozen=True, slots=True)
class MapForm:
    """`mask`, with what can be told of a tile without looking at its pairs.

    A row sees nothing outside the `closed` ranges, and in the full part of a range all that `columns` allows,
    which reads no `q_idx`. `closed` is None where nothing is known: a row may then see any key. `runs` says
    what the vectors in the slots after those of the captures are, which the ranges read.
    """

    mask: Expr
    closed: Ranges | None
    columns: Expr | None
    runs: tuple[IdRuns, ...] = ()

    @property
    def is_bounded(self) -> bool:
        """Whether not all pairs are left to look at: the ranges are exact, or leave out keys."""
        if self.closed is None:
            return False
        whole = (const(0, DType.I32), input_(Input.KV_LEN))
        return self.closed.is_exact or all((r.first, r.end) != whole for r in self.closed.ranges)

    def for_call(self, values: Sequence[object], q_len: int, kv_len: int) -> MapForm:
        """The form that is right for the captured numbers and lengths of a call."""
        if self.closed is None or self.closed.holds(values, q_len, kv_len):
            return self
        return replace(self, closed=None, runs=())


@dataclass(frozen=True, slots=True)
class MapSpec:
    """Everything that decides which kernel builds a map. Lengths, block sizes and values are not here."""

    form: MapForm
    captures: tuple[Capture, ...]
    unit_stride: frozenset[int] = frozenset()


@lru_cache(maxsize=512)
def map_form(mask: Expr, first_new_slot: int) -> MapForm:
    """The form of a simplified mask whose captures have the slots below `first_new_slot`."""
    parts = conjuncts(mask)
    if FALSE in parts:
        return MapForm(mask, Ranges(()), None)
    columns = tuple(p for p in parts if _is_of_columns(p))
    rest = tuple(p for p in parts if p not in columns)
    of_columns = _all_of(columns) if columns else None
    if not rest:
        zero, length = const(0, DType.I32), input_(Input.KV_LEN)
        return MapForm(mask, Ranges((Range(zero, length, zero, length),)), of_columns)
    closed, runs = closed_form_with_runs(_all_of(rest), first_new_slot)
    return MapForm(mask, closed, of_columns, runs)


def _is_of_columns(part: Expr) -> bool:
    """A condition on keys alone that is no range of them, such as `valid[kv_idx]`."""
    reads = inputs_of(part)
    if Input.Q_IDX in reads or Input.KV_IDX not in reads:
        return False
    found = closed_form(part)
    return found is None or not found.is_exact


def _all_of(parts: tuple[Expr, ...]) -> Expr:
    return reduce(lambda a, b: logic(Op.AND, a, b), parts)
