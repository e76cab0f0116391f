"""Take the mask out of a score_mod, and a mask apart into what must all hold."""

from __future__ import annotations

import math

from flexc.ir.build import FALSE, const, logic, unary
from flexc.ir.expr import Expr, fold, inputs_of
from flexc.ir.ops import Input, Op
from flexc.ir.rewrite_logic import flatten
from flexc.ir.simplify import simplify
from flexc.ir.types import DType

# A score, and where it is not -inf (None: everywhere that flexc can tell).
_Split = tuple[Expr, Expr | None]


def split_score(root: Expr) -> tuple[Expr, Expr | None]:
    """`(score, mask)` with `root == where(mask, score, -inf)`; mask is None where there is none to find.

    Found: `where(c, s, -inf)` with either arm, nested, in a MIN, floored, scaled by a positive literal, and
    with anything added or subtracted, as in `s + where(c, 0, -inf)`. What is added to -inf is taken to be
    neither NaN nor +inf: a masked pair stays masked. Not found: conditions on the score
    itself, which no mask can see; finite "infinities" such as -1e9, which do take part in the softmax of a
    row that has nothing else; infinities inside captured tensors. Both results are simplified.
    """
    score, mask = fold([root], _split)[root]
    mask = simplify(mask) if mask is not None else None
    return simplify(score), mask


def conjuncts(mask: Expr) -> tuple[Expr, ...]:
    """The parts of `mask` that must all hold, each once; none for the mask that is always true.

    Example: `(a & b) & ~(c | d)` gives `a`, `b`, `~c`, `~d`.
    """
    parts: list[Expr] = []
    for part in flatten(Op.AND, simplify(mask)):
        if part.op is Op.NOT and part.args[0].op is Op.OR:
            opposites = (simplify(unary(Op.NOT, each)) for each in flatten(Op.OR, part.args[0]))
            parts += [p for opposite in opposites for p in flatten(Op.AND, opposite)]
        else:
            parts.append(part)
    return tuple(p for p in dict.fromkeys(parts) if not (p.op is Op.CONST and p.attr is True))


def _split(node: Expr, parts: tuple[_Split, ...]) -> _Split:
    if node.dtype is not DType.F32:
        return node, None
    if node.op is Op.CONST and node.attr == -math.inf:
        return const(0.0), FALSE
    if node.op is Op.WHERE:
        return _split_where(node, parts[1], parts[2])
    if all(mask is None for _, mask in parts) or not _keeps_infinity(node, parts):
        return node, None
    masks = [mask for _, mask in parts if mask is not None]
    mask = masks[0] if len(masks) == 1 else logic(Op.AND, *masks)
    return Expr(node.op, tuple(score for score, _ in parts), node.attr, node.dtype), mask


def _keeps_infinity(node: Expr, parts: tuple[_Split, ...]) -> bool:
    """Whether -inf in the operands that have a mask makes the result -inf."""
    if node.op in (Op.ADD, Op.MIN, Op.FLOOR, Op.DETACH):
        return True
    if node.op is Op.SUB:
        return parts[1][1] is None
    if node.op is Op.MUL:
        return any(_is_positive(arg) for arg in node.args)
    return node.op is Op.DIV and _is_positive(node.args[1])


def _is_positive(x: Expr) -> bool:
    return x.op is Op.CONST and isinstance(x.attr, float) and 0 < x.attr < math.inf


def _split_where(node: Expr, taken: _Split, other: _Split) -> _Split:
    condition = node.args[0]
    (x, x_mask), (y, y_mask) = taken, other
    if (x_mask is None and y_mask is None) or Input.SCORE in inputs_of(condition):
        return node, None
    opposite = unary(Op.NOT, condition)
    if x_mask is FALSE:
        return y, opposite if y_mask is None else logic(Op.AND, opposite, y_mask)
    if y_mask is FALSE:
        return x, condition if x_mask is None else logic(Op.AND, condition, x_mask)
    score = Expr(Op.WHERE, (condition, x, y), None, node.dtype)
    seen = condition if x_mask is None else logic(Op.AND, condition, x_mask)
    unseen = opposite if y_mask is None else logic(Op.AND, opposite, y_mask)
    return score, logic(Op.OR, seen, unseen)
