"""Sums taken apart, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op


def signed_terms(node: Expr, sign: int = 1) -> list[tuple[Expr, int]]:
    """The summands of a sum with their signs."""
    if node.op in (Op.ADD, Op.SUB):
        left, right = node.args
        return [*signed_terms(left, sign), *signed_terms(right, sign if node.op is Op.ADD else -sign)]
    if node.op is Op.NEG:
        return signed_terms(node.args[0], -sign)
    return [(node, sign)]


def signed_sum(terms: Sequence[tuple[Expr, int]]) -> Expr:
    """The sum of terms with signs, positive ones first."""
    (total, sign), *others = sorted(terms, key=lambda term: -term[1])
    if sign < 0:
        total = build.unary(Op.NEG, total)
    for term, s in others:
        total = build.binary(Op.ADD if s > 0 else Op.SUB, total, term)
    return total
