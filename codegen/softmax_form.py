"""What the softmax takes over from a score: a positive factor of all of it, and a summand of the row.

The softmax multiplies by a factor in any case, and subtracts a number of the row: so both cost nothing there.
They change a float by at most its last places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.codegen.signed_terms import signed_sum, signed_terms
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.score_range import score_extent

NEAR_ZERO = 50.0
"""In base 2, that is 73."""
MOST_SHIFT = 24.0
"""In base 2. With scores as near to zero, weights are below 2**97: of these, 2**29 add up to a float."""
MARGIN = 64.0
"""Added in base 2 to what the first keys of a row say of its largest score.

Later scores may then be larger by 168, and only weights below 2**-60 of the largest first one are lost."""
MARGIN_OF_SLOPES = 32.0
"""The same where scores may rise with the distance by themselves, which takes from the range below."""
TOO_LARGE = 2.0**24
"""Sums of weights up to 2**104 have a reciprocal, and no weight among them is infinite."""
TOO_SMALL = 2.0**-94
"""Sums below may lack weights that were rounded to 0, a part of 2**-32: slopes promised larger scores than
a row then saw."""
_LEAST = 1e-30
"""In place of 0, which would make NaN of the scores of masked pairs."""


@dataclass(frozen=True, slots=True)
class SoftmaxForm:
    """The score is `(score + row) * factor * size`, of an input times `sign`.

    `row` is None for 0, `size` and `sign` are None for 1. `size` is a positive number of the call.
    """

    score: Expr | None
    row: Expr | None
    factor: float
    size: Expr | None = None
    sign: Expr | None = None

    def scale(self, factor: Expr | None) -> Expr | None:
        """What the input is multiplied by if it was `factor` without the sign."""
        if factor is None or self.sign is None:
            return factor or self.sign
        return build.binary(Op.MUL, factor, self.sign)


def usual(margin: float) -> float:
    """How far from zero, in base 2, largest first scores may be for others not to be far larger.

    Of scores as if drawn from a bell curve, a third of the range of larger ones leaves room for all.
    """
    return (margin + 104.0) / 3


def is_near_zero(score: Expr | None, values: Sequence[object]) -> bool:
    """Whether no score can be further from zero than `NEAR_ZERO`, by its form and the captured numbers."""
    return score is not None and score_extent(score, values) <= NEAR_ZERO


def softmax_form(score: Expr, *, by_row: bool = True) -> SoftmaxForm:
    """Split a score; `by_row`: a summand of the row too.

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
    cap = _cap(score)
    if cap is not None:
        size = build.binary(Op.MAX, build.unary(Op.ABS, cap), build.const(_LEAST))
        sign = build.where(build.compare(Op.LT, cap, build.const(0.0)), build.const(-1.0), build.const(1.0))
        return SoftmaxForm(build.unary(Op.TANH, build.input_(Input.SCORE)), None, factor, size, sign)
    levels = place(score)
    terms = signed_terms(score) if score.dtype.is_float else [(score, 1)]
    row = [(term, sign) for term, sign in terms if levels[term] is Placement.ROW]
    rest = [(term, sign) for term, sign in terms if levels[term] is not Placement.ROW]
    if not row or not rest or not by_row:
        return SoftmaxForm(score, None, factor)
    return SoftmaxForm(signed_sum(rest), signed_sum(row), factor)


def _cap(score: Expr) -> Expr | None:
    """The number c of a soft cap `c * tanh(score)`. The tangent is odd: a sign may go to its argument."""
    if score.op is not Op.MUL:
        return None
    for cap, other in (score.args, score.args[::-1]):
        if cap.op is Op.SCALAR and other.op is Op.TANH and other.args[0] is build.input_(Input.SCORE):
            return cap
    return None


def summands(total: Expr) -> list[Expr]:
    """The terms of a float sum."""
    return [term for term, _ in signed_terms(total)]


def _is_positive(node: Expr) -> bool:
    return node.op is Op.CONST and isinstance(node.attr, float) and 1e-30 < node.attr < 1e30
