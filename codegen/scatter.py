"""Gradients of captured tensors, as a kernel adds them up: over which axes, and where the sums go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flexc.codegen.signs import nonnegative
from flexc.ir.adjoint import Scatter
from flexc.ir.affine import affine_forms
from flexc.ir.build import TRUE, binary, cast, compare, const, input_, logic, size, where
from flexc.ir.expr import Expr, inputs_of, topological
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
    """The columns of a row."""
    DIAGONAL = "diagonal"
    """The pairs at one distance: the element depends on `q_idx - kv_idx` only."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class ScatterForm:
    """A gradient: `value` of each pair goes to the element `at`, if that is `inside`.

    Elements are counted in row-major order.
    """

    slot: int
    value: Expr
    at: Expr
    inside: Expr
    sum: Sum
    meets_once: bool
    """No two pairs share an element."""


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
        value=scatter.value,
        at=simplify(at),
        inside=simplify(inside) if scatter.indices else compare(Op.LE, const(0), input_(Input.H)),
        sum=_sum(scatter),
        meets_once={Input.B, Input.H, Input.Q_IDX, Input.KV_IDX} <= plain,
    )


def _sum(scatter: Scatter) -> Sum:
    level = Placement.HEAD
    for placement in place(*scatter.indices).values():
        level = level.join(placement)
    if level is Placement.ELEMENT:
        return Sum.DIAGONAL if all(_is_of_distance(index) for index in scatter.indices) else Sum.NOTHING
    return {Placement.HEAD: Sum.HEAD, Placement.ROW: Sum.ROW, Placement.COLUMN: Sum.COLUMN}[level]


def _is_of_distance(index: Expr) -> bool:
    """Whether `index` is the same for all pairs of a head at one `q_idx - kv_idx`."""
    forms = affine_forms(index)
    q, kv = input_(Input.Q_IDX), input_(Input.KV_IDX)
    of_distance: dict[Expr, bool] = {}
    for node in topological(index):
        reads = inputs_of(node)
        if Input.SCORE in reads or Input.GRAD in reads:
            return False
        if not reads & {Input.Q_IDX, Input.KV_IDX}:
            of_distance[node] = True
            continue
        same = bool(node.args) and all(of_distance[arg] for arg in node.args)
        if not same and node in forms:
            factors = dict(forms[node].terms)
            cancels = factors.pop(q, 0) == -factors.pop(kv, 0)
            same = cancels and all(of_distance.get(atom, False) for atom in factors)
        of_distance[node] = same
    return of_distance[index]
