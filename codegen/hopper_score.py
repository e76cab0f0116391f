"""What a Hopper forward computes of a score for each pair, and what it leaves to rows, heads and softmax."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.blocks import ranges_of
from flexc.codegen.distance import reads_by_distance
from flexc.codegen.hoisting import mask_form, score_form
from flexc.codegen.hopper_masks import by_ends
from flexc.codegen.nearness import near_form
from flexc.codegen.signed_terms import signed_terms
from flexc.codegen.softmax_form import SoftmaxForm, softmax_form, summands
from flexc.ir import build
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec
from flexc.ir.types import DType

_SCORE = build.input_(Input.SCORE)
_KV = build.cast(build.input_(Input.KV_IDX), DType.F32)


@dataclass(frozen=True, slots=True)
class HopperScore:
    """The forms of a spec's score and mask.

    `near` are parts of distances, whose indices count from the first key of a step. `factor` joins the
    softmax scale.
    """

    form: SoftmaxForm
    factor: Expr | None
    allowed: Expr | None
    near: frozenset[Expr]

    @property
    def slope(self) -> Expr | None:
        """What scores rise by from key to key; None if they are more than that, a row's part and `q . k`."""
        score, row = self.form.score, self.form.row
        if score is None or row is None or self.form.size is not None or not self.near:
            return None
        terms = signed_terms(score)
        others = [(term, sign) for term, sign in terms if term is not _SCORE]
        if len(others) != 1 or (_SCORE, 1) not in terms:
            return None
        (term, sign) = others[0]
        slope = _slope(term)
        return None if slope is None else slope if sign > 0 else build.unary(Op.NEG, slope)


def hopper_score(spec: AttentionSpec, *, packed: bool, by_row: bool) -> HopperScore:
    """The forms of `spec`; `packed`: rows of a tile are of several heads; `by_row`: see `softmax_form`."""
    score, factor = score_form(spec)
    allowed = mask_form(spec)
    if allowed is not None and not packed:
        allowed = by_ends(allowed, ranges_of(spec))
    score, parts = _near(score, allowed, packed=packed)
    form = SoftmaxForm(None, None, 1.0) if score is None else softmax_form(score, by_row=by_row)
    if form.row is not None and parts & set(topological(form.row)):
        # Of a step's distances, the row's part is new in every step: whatever else it has is not.
        form = form if parts.issuperset(summands(form.row)) else SoftmaxForm(score, None, 1.0)
        parts |= {form.row} if form.row is not None else frozenset()
    return HopperScore(form, form.scale(factor), allowed, parts)


def _near(score: Expr | None, mask: Expr | None, *, packed: bool) -> tuple[Expr | None, frozenset[Expr]]:
    """The score with its distances in parts, if the mask needs none of them and nothing is read at one.

    `packed`: rows of a tile are of several heads, and nothing is read once a distance.
    """
    at_distances = score is not None and not packed and bool(reads_by_distance(score))
    found = None if score is None or at_distances else near_form(score, by_head=not packed)
    if found is None or (mask is not None and found[1] & set(topological(mask))):
        return score, frozenset()
    return found


def _slope(term: Expr) -> Expr | None:
    """The factor of a key's index that `term` is; None if it is anything else."""
    if term is _KV:
        return build.const(1.0)
    if term.op is not Op.MUL or _KV not in term.args:
        return None
    factor = term.args[0] if term.args[1] is _KV else term.args[1]
    return factor if place(factor)[factor] in (Placement.KERNEL, Placement.HEAD) else None
