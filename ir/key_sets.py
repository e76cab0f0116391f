"""Sets of keys of a row: unions of pieces, each between bounds on `kv_idx`, in rows of some conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.ir.build import unary
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.ranges import LONGEST
from flexc.ir.rewrite_logic import negation
from flexc.ir.symbolic import Algebra, Form


@dataclass(frozen=True, slots=True)
class Piece:
    """The keys at or above every one of `firsts` and below every one of `ends`, in rows of all `conditions`.

    Keys are at or above 0 and below the length besides. `exact`: the row sees them all; otherwise maybe.
    """

    firsts: tuple[Form, ...] = ()
    ends: tuple[Form, ...] = ()
    conditions: tuple[Expr, ...] = ()
    exact: bool = True

    @property
    def is_whole(self) -> bool:
        return not (self.firsts or self.ends or self.conditions)


EVERYTHING = Piece()


def opposite(condition: Expr) -> Expr:
    """The negation of a condition."""
    return negation(condition) or unary(Op.NOT, condition)


def _tightest(algebra: Algebra, forms: Sequence[Form], *, largest: bool) -> tuple[Form, ...]:
    """`forms` without those that another one makes needless."""
    kept: list[Form] = []
    for form in dict.fromkeys(forms):

        def implied(by: Form, form: Form = form) -> bool:
            return algebra.at_most(form, by) if largest else algebra.at_most(by, form)

        if any(implied(other) for other in kept):
            continue
        kept = [other for other in kept if not _implies(algebra, form, other, largest=largest)]
        kept.append(form)
    return tuple(kept)


def _implies(algebra: Algebra, form: Form, other: Form, *, largest: bool) -> bool:
    return algebra.at_most(other, form) if largest else algebra.at_most(form, other)


def tidied(algebra: Algebra, piece: Piece) -> Piece | None:
    """The piece without needless bounds; None where it surely has no keys."""
    conditions = tuple(dict.fromkeys(piece.conditions))
    if any(opposite(c) in conditions for c in conditions):
        return None
    firsts = [f for f in piece.firsts if algebra.extent(f).hi > 0]
    ends = [e for e in piece.ends if algebra.extent(e).lo < LONGEST]
    if any(algebra.extent(e).hi <= 0 for e in ends) or any(algebra.extent(f).lo >= LONGEST for f in firsts):
        return None
    if any(algebra.at_most(end, first) for end in ends for first in firsts):
        return None
    return Piece(
        _tightest(algebra, firsts, largest=True),
        _tightest(algebra, ends, largest=False),
        conditions,
        piece.exact,
    )


def intersection(algebra: Algebra, one: Sequence[Piece], two: Sequence[Piece]) -> list[Piece]:
    """The keys in both unions."""
    found = []
    for a in one:
        for b in two:
            both = Piece(
                a.firsts + b.firsts, a.ends + b.ends, a.conditions + b.conditions, a.exact and b.exact
            )
            piece = tidied(algebra, both)
            if piece is not None:
                found.append(piece)
    return absorbed(algebra, found)


def absorbed(algebra: Algebra, pieces: Sequence[Piece]) -> list[Piece]:
    """The union without the pieces that lie in another one which says as much."""
    kept: list[Piece] = []
    for piece in pieces:
        if any(contains(algebra, k, piece) and (k.exact or not piece.exact) for k in kept):
            continue
        kept = [k for k in kept if not (contains(algebra, piece, k) and (piece.exact or not k.exact))]
        kept.append(piece)
    return kept


def contains(algebra: Algebra, outer: Piece, inner: Piece) -> bool:
    """Whether every key of `inner` is surely one of `outer`."""
    return (
        set(outer.conditions) <= set(inner.conditions)
        and all(any(algebra.at_most(o, i) for i in inner.firsts) for o in outer.firsts)
        and all(any(algebra.at_most(i, o) for i in inner.ends) for o in outer.ends)
    )


def touch(algebra: Algebra, one: Piece, two: Piece) -> bool:
    """Whether two pieces of the same rows surely leave no gap, so that their hull is their union."""
    return all(algebra.at_most(first, end) for first in one.firsts for end in two.ends) and all(
        algebra.at_most(first, end) for first in two.firsts for end in one.ends
    )
