"""Rewrites that make a score cheap per element: work moves to where it is done once a row, column or head.

All three change a float by at most its last place; integers stay exact.
"""

from __future__ import annotations

import math

from flexc.ir import build
from flexc.ir.expr import Expr, rebuild, topological, with_args
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.types import DType

SHORT = 2**23
"""Indices below this stay exact in 32-bit floats even after a literal below it was added."""


def split_index_casts(root: Expr) -> Expr:
    """`float(q_idx - kv_idx)` becomes `float(q_idx) - float(kv_idx)`: no conversion is left per element.

    Requires lengths below `SHORT`, so that every index and difference is exact. Also under `abs`.
    """
    levels = place(root)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.CAST and node.dtype is DType.F32 and levels[node] is Placement.ELEMENT:
            pushed = _pushed(args[0])
            if pushed is not None:
                return pushed
        return with_args(node, args)

    return rebuild(root, replace)


def _pushed(index: Expr) -> Expr | None:
    if index.op is Op.ABS:
        inner = _pushed(index.args[0])
        return None if inner is None else build.unary(Op.ABS, inner)
    if index.op in (Op.ADD, Op.SUB) and all(_is_short(arg) for arg in index.args):
        return build.binary(index.op, *(build.cast(arg, DType.F32) for arg in index.args))
    return None


def _is_short(index: Expr) -> bool:
    """An index itself, or with a small literal added: exact as a float."""
    if index.op is Op.INPUT:
        return index.attr in (Input.Q_IDX, Input.KV_IDX)
    if index.op is Op.CONST:
        return isinstance(index.attr, int) and abs(index.attr) < SHORT
    return (
        index.op in (Op.ADD, Op.SUB)
        and any(a.op is Op.CONST for a in index.args)
        and all(map(_is_short, index.args))
    )


def multiply_by_reciprocals(root: Expr) -> Expr:
    """`x / d` becomes `x * (1 / d)` where `d` is known at a lower level: one division a row, column or head."""
    levels = place(root)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is not Op.DIV or node.args[0].op is Op.CONST:
            return with_args(node, args)
        numerator, divisor = args
        if divisor.op is Op.CONST:
            value = divisor.attr
            if isinstance(value, float) and value != 0 and math.isfinite(value) and math.isfinite(1 / value):
                return build.binary(Op.MUL, numerator, build.const(1 / value))
        elif levels[node.args[1]] is not Placement.ELEMENT and levels[node] is Placement.ELEMENT:
            return build.binary(Op.MUL, numerator, build.binary(Op.DIV, build.const(1.0), divisor))
        return with_args(node, args)

    return rebuild(root, replace)


def fold_scale(root: Expr) -> tuple[Expr, Expr | None]:
    """Take a factor that every use of `score` is multiplied by out of the graph: it joins the softmax scale.

    Returns the graph with `score` for `score * factor`, and the factor, which the head knows; or the graph
    as it was and None. Example: `c * tanh(score * (1 / c))` gives `c * tanh(score)` and `1 / c`.
    """
    levels = place(root)
    factors: set[Expr] = set()
    for node in topological(root):
        for arg in node.args:
            if arg.op is Op.INPUT and arg.attr is Input.SCORE:
                factor = _factor(node)
                if factor is None or levels[factor] not in (Placement.KERNEL, Placement.HEAD):
                    return root, None
                factors.add(factor)
    if len(factors) != 1:
        return root, None
    (factor,) = factors
    score = build.input_(Input.SCORE)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return score if score in node.args and node.op is Op.MUL else with_args(node, args)

    return rebuild(root, replace), factor


def _factor(node: Expr) -> Expr | None:
    if node.op is not Op.MUL:
        return None
    a, b = node.args
    return b if a.op is Op.INPUT and a.attr is Input.SCORE else a
