"""Gradients of captured tensors, as a kernel adds them up: over which axes, and where the sums go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flexc.codegen.distance import is_of_distance
from flexc.codegen.signs import nonnegative
from flexc.ir.adjoint import Scatter
from flexc.ir.build import TRUE, binary, cast, compare, const, input_, logic, size, where
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.simplify import simplify
from flexc.ir.types import DType


class Sum(Enum):
    """What a kernel adds up before a gradient touches memory."""

    HEAD = "head"
    """Every pair of a head: the element is the head's."""
    COLUMN = "column"
    """The rows of a column."""
    ROW = "row"
    """The columns of a row, which go to a sum of that row in memory."""
    DIAGONAL = "diagonal"
    """The pairs at one distance, where the element depends on `q_idx - kv_idx` only: as of a row."""
    NOTHING = "nothing"
    """Pairs of a tile that are found to share an element, if these are many."""

    @property
    def has_places(self) -> bool:
        """Whether memory has a sum for each row or distance of a head, that goes to its element in the end.

        Few elements may belong to many rows or distances: programs that add to the same few wait in line.
        """
        return self in (Sum.ROW, Sum.DIAGONAL)


@dataclass(frozen=True, slots=True)
class ScatterForm:
    """A gradient: `value` of each pair goes to the element `at`, if that is `inside`.

    Elements are counted in row-major order.
    """

    slot: int
    indices: tuple[Expr, ...]
    value: Expr
    at: Expr
    inside: Expr
    sum: Sum
    meets_once: bool
    """No two pairs share an element."""
    by_batch: bool
    """Whether the element depends on the batch."""

    @property
    def reads_values(self) -> bool:
        """Whether the element depends on captured values."""
        return any(n.op in (Op.LOAD, Op.SCALAR) for n in topological(*self.indices))


def scatter_form(scatter: Scatter) -> ScatterForm:
    """Where the sums of a scatter go."""
    signs = nonnegative(*scatter.indices)
    at, inside = const(0, DType.I64), TRUE
    for dimension, index in enumerate(scatter.indices):
        length = size(scatter.slot, dimension)
        if index not in signs:
            index = where(compare(Op.LT, index, const(0)), binary(Op.ADD, index, length), index)
            inside = logic(Op.AND, inside, compare(Op.LE, const(0), index))
        inside = logic(Op.AND, inside, compare(Op.LT, index, length))
        at = binary(Op.ADD, binary(Op.MUL, at, cast(length, DType.I64)), cast(index, DType.I64))
    plain = {index.attr for index in scatter.indices if index.op is Op.INPUT}
    return ScatterForm(
        slot=scatter.slot,
        indices=scatter.indices,
        value=scatter.value,
        at=simplify(at),
        inside=simplify(inside) if scatter.indices else compare(Op.LE, const(0), input_(Input.H)),
        sum=_sum(scatter),
        meets_once={Input.B, Input.H, Input.Q_IDX, Input.KV_IDX} <= plain,
        by_batch=Input.B in scatter.axes,
    )


def _sum(scatter: Scatter) -> Sum:
    level = Placement.HEAD
    for placement in place(*scatter.indices).values():
        level = level.join(placement)
    if level is Placement.ELEMENT:
        return Sum.DIAGONAL if all(is_of_distance(index) for index in scatter.indices) else Sum.NOTHING
    return {Placement.HEAD: Sum.HEAD, Placement.ROW: Sum.ROW, Placement.COLUMN: Sum.COLUMN}[level]
