"""Documents by search: two positions are in one document where as many starts are before both.

`searchsorted(starts, q_idx) == searchsorted(starts, kv_idx)` is traced as an equation of two sums of
`starts[i] <= position`. Such counts only grow with the position: they are equal where every summand is.
"""

from __future__ import annotations

from flexc.ir.build import cast, compare, input_
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input, Op
from flexc.ir.rewrite_logic import flatten
from flexc.ir.substitute import substitute
from flexc.ir.types import DType


def agreements(a: Expr, b: Expr) -> list[Expr]:
    """Conditions that all hold exactly where `a == b`, for two counts of one list of steps; else none."""
    sides = [_steps(side) for side in (a, b)]
    of_key = [side for side in sides if side and all(_is_step(step) for step in side)]
    if len(of_key) != 1:
        return []
    (keys,) = of_key
    rows = sides[1] if keys is sides[0] else sides[0]
    at_query = [substitute(step, {Input.KV_IDX: input_(Input.Q_IDX)}) for step in keys]
    if len(keys) < 2 or sorted(map(id, at_query)) != sorted(map(id, rows)):
        return []
    return [compare(Op.EQ, key, row) for key, row in zip(keys, at_query, strict=True)]


def _steps(count: Expr) -> list[Expr]:
    """The conditions that a sum counts; none where it sums anything else."""
    while count.op is Op.CAST and count.args[0].dtype.is_integer:
        count = count.args[0]
    summands = flatten(Op.ADD, count)
    if all(s.op is Op.CAST and s.args[0].dtype is DType.BOOL for s in summands):
        return [s.args[0] for s in summands]
    return []


def _is_step(condition: Expr) -> bool:
    """Whether it is `border <= kv_idx` or `border < kv_idx`, of a border that no position moves."""
    if condition.op not in (Op.LE, Op.LT):
        return False
    border, position = condition.args
    return position is cast(input_(Input.KV_IDX), position.dtype) and not inputs_of(border) & {
        Input.Q_IDX,
        Input.KV_IDX,
    }
