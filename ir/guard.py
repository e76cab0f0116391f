"""A graph that automatic differentiation by the array library treats as the rules of `adjoint` do.

PyTorch's `where` sends a gradient of 0 into the branch that was not taken; where the derivative there is
infinite or NaN, the product is NaN. So nothing in such a branch may have one: operands are 1 there.
"""

from __future__ import annotations

from functools import lru_cache

from flexc.ir.adjoint_rules import is_number
from flexc.ir.build import compare, const, logic, unary, where
from flexc.ir.expr import Expr, rebuild, with_args
from flexc.ir.ops import Op

_MAY_BE_INFINITE = frozenset(
    {Op.MUL, Op.DIV, Op.POW, Op.EXP, Op.EXP2, Op.LOG, Op.LOG2, Op.SQRT, Op.RSQRT, Op.SIN, Op.COS}
)
"""Derivatives that are not finite for some operands, or are not for infinite ones."""


@lru_cache(maxsize=256)
def guarded(root: Expr) -> Expr:
    """The same values; in branches of a choice that are not taken, only finite derivatives.

    Extremes of a number become choices, whose gradient where both are equal is the other operand's.
    """
    return _Guard().of(rebuild(root, _chosen), None)


def _chosen(node: Expr, args: tuple[Expr, ...]) -> Expr:
    if node.op not in (Op.MIN, Op.MAX) or node.attr is not None or not node.dtype.is_float:
        return with_args(node, args)
    numbers = [arg for arg in args if is_number(arg)]
    if len(numbers) != 1:
        return with_args(node, args)
    (bound,) = numbers
    (x,) = (arg for arg in args if arg is not bound)
    beyond = compare(Op.LT, x, bound) if node.op is Op.MAX else compare(Op.LT, bound, x)
    return where(beyond, bound, x)


class _Guard:
    """Rewrites nodes for where they matter. One that matters in two places has two forms."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Expr, Expr | None], Expr] = {}

    def of(self, node: Expr, matters: Expr | None) -> Expr:
        """`node` for the pairs where `matters` holds (None: all); elsewhere its value is any."""
        if not node.args or not node.dtype.is_float:
            return node
        form = self._forms.get((node, matters))
        if form is None:
            form = self._forms[node, matters] = self._form(node, matters)
        return form

    def _form(self, node: Expr, matters: Expr | None) -> Expr:
        if node.op is Op.WHERE:
            condition, x, y = node.args
            otherwise = unary(Op.NOT, condition)
            return where(
                condition, self.of(x, _both(matters, condition)), self.of(y, _both(matters, otherwise))
            )
        args = tuple(self.of(arg, matters) for arg in node.args)
        if matters is not None and node.op in _MAY_BE_INFINITE:
            args = tuple(arg if arg.op is Op.CONST else where(matters, arg, const(1.0)) for arg in args)
        return with_args(node, args)


def _both(one: Expr | None, other: Expr) -> Expr:
    return other if one is None else logic(Op.AND, one, other)
