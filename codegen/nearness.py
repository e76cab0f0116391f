"""Scores that depend on the distance of query and key only: indices may count from any key.

`slopes[h] * (kv_idx - q_idx)` costs a conversion and a product for each key of a step. Counted from the first
key of the step, the part of the keys is the same in every step, and that of the rows is two numbers a thread.
Both are smaller than the indices, so nothing gets less exact.
"""

from __future__ import annotations

from flexc.ir import build
from flexc.ir.expr import Expr, rebuild, topological, with_args
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.types import DType

_Q, _KV = (build.cast(build.input_(which), DType.F32) for which in (Input.Q_IDX, Input.KV_IDX))


def near_form(score: Expr) -> tuple[Expr, frozenset[Expr]] | None:
    """`score` with its distances split into a part of the row and one of the column, and these parts.

    Adding the same number to `q_idx` and `kv_idx` in all parts changes nothing. None if the indices as floats
    are used in another way than in a distance, or not at all.
    """
    nodes = topological(score)
    users = [node for node in nodes if _Q in node.args or _KV in node.args]
    if not users or any(node.op is not Op.SUB or {*node.args} != {_Q, _KV} for node in users):
        return None
    levels = place(score)
    parts: set[Expr] = {_Q, _KV}

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.MUL:
            for factor, distance in (node.args, node.args[::-1]):
                if distance in users and levels[factor] <= Placement.HEAD:
                    left, right = (build.binary(Op.MUL, factor, index) for index in distance.args)
                    parts.update((left, right))
                    return build.binary(Op.SUB, left, right)
        return with_args(node, args)

    return rebuild(score, replace), frozenset(parts)
