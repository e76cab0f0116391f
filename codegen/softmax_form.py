"""What the softmax takes over from a score: a positive factor of all of it, and a summand of the row.

The softmax multiplies by a factor in any case, and subtracts a number of the row: so both cost nothing there.
They change a float by at most its last places.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.place import Placement, place


@dataclass(frozen=True, slots=True)
class SoftmaxForm:
    """The score is `(score + row) * factor`; `row` is None for 0."""

    score: Expr | None
    row: Expr | None
    factor: float


def softmax_form(score: Expr) -> SoftmaxForm:
    """Split a score.

    Example: `30 * tanh(score)` gives `tanh(score)` and 30; of `score + (a[kv_idx] - b[q_idx])`, the part of
    the row is `-b[q_idx]`.
    """
    factor = 1.0
    while score.op is Op.MUL:
        literals = [arg for arg in score.args if _is_positive(arg)]
        if not literals:
            break
        literal = literals[0]
        factor *= literal.attr  # type: ignore[operator]
        score = score.args[0] if score.args[1] is literal else score.args[1]
    levels = place(score)
    terms = _terms(score, 1)
    row = [(term, sign) for term, sign in terms if levels[term] is Placement.ROW]
    rest = [(term, sign) for term, sign in terms if levels[term] is not Placement.ROW]
    if not row or not rest:
        return SoftmaxForm(score, None, factor)
    return SoftmaxForm(_sum(rest), _sum(row), factor)


def summands(total: Expr) -> list[Expr]:
    """The terms of a float sum."""
    return [term for term, _ in _terms(total, 1)]


def _is_positive(node: Expr) -> bool:
    return node.op is Op.CONST and isinstance(node.attr, float) and 1e-30 < node.attr < 1e30


def _terms(node: Expr, sign: int) -> list[tuple[Expr, int]]:
    """The summands of a float sum with their signs."""
    if not node.dtype.is_float:
        return [(node, sign)]
    if node.op is Op.ADD:
        return [*_terms(node.args[0], sign), *_terms(node.args[1], sign)]
    if node.op is Op.SUB:
        return [*_terms(node.args[0], sign), *_terms(node.args[1], -sign)]
    if node.op is Op.NEG:
        return _terms(node.args[0], -sign)
    return [(node, sign)]


def _sum(terms: list[tuple[Expr, int]]) -> Expr:
    """The signed sum, positive terms first."""
    (total, sign), *others = sorted(terms, key=lambda term: -term[1])
    if sign < 0:
        total = build.unary(Op.NEG, total)
    for term, s in others:
        total = build.binary(Op.ADD if s > 0 else Op.SUB, total, term)
    return total
