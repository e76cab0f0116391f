"""Integer nodes as sums of multiples of simpler nodes, so that what cancels is seen to cancel.

Interval arithmetic takes the two `q` of `(q + 3) - q` for unrelated; their affine forms differ by a literal.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Op
from flexc.ir.types import DType

# Sums of atoms of 32 bits with coefficients below this sum stay inside 64 bits.
_LARGEST_WEIGHT = 2**30


@dataclass(frozen=True, slots=True)
class Affine:
    """`sum(factor * atom) + constant`, equal to its node modulo 2 to its width. Atoms occur once."""

    terms: tuple[tuple[Expr, int], ...]
    constant: int

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """The sum of this form and a multiple of another."""
        factors = dict(self.terms)
        for atom, own in other.terms:
            factors[atom] = factors.get(atom, 0) + factor * own
        terms = tuple((atom, f) for atom, f in factors.items() if f != 0)
        return Affine(terms, self.constant + factor * other.constant)

    @property
    def weight(self) -> int:
        """The sum of the absolute factors and constant."""
        return sum(abs(factor) for _, factor in self.terms) + abs(self.constant)


def affine_forms(root: Expr) -> dict[Expr, Affine]:
    """The form of every integer node under `root`; what is not a sum or multiple is its own atom."""
    forms: dict[Expr, Affine] = {}
    for node in topological(root):
        if node.dtype.is_integer:
            form = _form(node, forms)
            bounded = form is not None and form.weight <= _LARGEST_WEIGHT
            forms[node] = form if form is not None and bounded else Affine(((node, 1),), 0)
    return forms


def _form(node: Expr, forms: dict[Expr, Affine]) -> Affine | None:
    if node.op is Op.CONST:
        return Affine((), int(node.attr)) if isinstance(node.attr, int) else None
    if node.op in (Op.ADD, Op.SUB):
        return forms[node.args[0]].plus(forms[node.args[1]], 1 if node.op is Op.ADD else -1)
    if node.op is Op.NEG:
        return Affine((), 0).plus(forms[node.args[0]], -1)
    if node.op is Op.MUL:
        left, right = (forms[arg] for arg in node.args)
        if left.terms and right.terms:
            return None
        return Affine((), 0).plus(left, right.constant) if left.terms else _scaled(right, left.constant)
    if node.op is Op.SHL:
        shift = forms[node.args[1]]
        if not shift.terms and 0 <= shift.constant < 30:
            return _scaled(forms[node.args[0]], 1 << shift.constant)
    if node.op is Op.CAST and node.dtype is DType.I64 and node.args[0].dtype is DType.I32:
        inner = forms[node.args[0]]
        # A widened sum may have wrapped at 32 bits, so only a single atom is the same number.
        return inner if inner == Affine(((node.args[0], 1),), 0) else None
    return None


def _scaled(form: Affine, factor: int) -> Affine:
    return Affine((), 0).plus(form, factor)
