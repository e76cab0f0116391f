"""Fewer pieces for the same keys, and the bounds of a piece as expressions."""

from __future__ import annotations

from collections.abc import Sequence

from flexc.ir.build import binary, const, input_, where
from flexc.ir.expr import Expr
from flexc.ir.key_sets import Piece, absorbed, opposite, touch
from flexc.ir.ops import Input, Op
from flexc.ir.rewrite_logic import join
from flexc.ir.simplify import simplify
from flexc.ir.symbolic import Algebra, Form

_ZERO = const(0)
_KV_LEN = input_(Input.KV_LEN)


def first_of(algebra: Algebra, piece: Piece) -> Expr:
    """The first key of a piece: the largest of its bounds, and not negative."""
    forms = piece.firsts
    if not any(algebra.extent(form).lo >= 0 for form in forms):
        return simplify(_extreme(Op.MAX, [*(algebra.bound(form) for form in forms), _ZERO]))
    return simplify(_extreme(Op.MAX, [algebra.bound(form) for form in forms]))


def end_of(algebra: Algebra, piece: Piece) -> Expr:
    """Behind the last key: the least of the bounds, 0 where the conditions don't hold."""
    end = _extreme(Op.MIN, [algebra.bound(form) for form in piece.ends]) if piece.ends else _KV_LEN
    if piece.conditions:
        end = where(join(Op.AND, list(piece.conditions)), end, _ZERO)
    return simplify(end)


def _extreme(op: Op, parts: Sequence[Expr]) -> Expr:
    result = parts[0]
    for part in parts[1:]:
        result = binary(op, result, part)
    return result


def merged(algebra: Algebra, keys: Sequence[Piece]) -> list[Piece]:
    """The same keys in fewer pieces.

    Pieces that surely touch become one, and those whose rows exclude each other.
    """
    pieces = absorbed(algebra, keys)
    for join_two in (_joined, _alternatives_alike, _alternatives):
        i = 0
        while i < len(pieces):
            for j in range(i + 1, len(pieces)):
                both = join_two(algebra, pieces[i], pieces[j])
                if both is not None:
                    pieces = absorbed(algebra, [*pieces[:i], both, *pieces[i + 1 : j], *pieces[j + 1 :]])
                    i = -1
                    break
            i += 1
    return pieces


def _joined(algebra: Algebra, one: Piece, two: Piece) -> Piece | None:
    """The hull of two pieces of the same rows without a gap."""
    same = set(one.conditions) == set(two.conditions) and one.exact is two.exact
    if not same or not touch(algebra, one, two):
        return None
    firsts = _outer(algebra, one.firsts, two.firsts, Op.MIN)
    ends = _outer(algebra, one.ends, two.ends, Op.MAX)
    return Piece(firsts, ends, one.conditions, one.exact)


def _outer(algebra: Algebra, one: tuple[Form, ...], two: tuple[Form, ...], op: Op) -> tuple[Form, ...]:
    """The looser of two lists of bounds: `op` of what each list comes to."""
    if not one or not two:
        return ()

    def looser(a: tuple[Form, ...], b: tuple[Form, ...]) -> bool:
        if op is Op.MIN:
            return all(any(algebra.at_most(x, y) for y in b) for x in a)
        return all(any(algebra.at_most(y, x) for y in b) for x in a)

    if looser(one, two):
        return one
    if looser(two, one):
        return two
    inner = Op.MAX if op is Op.MIN else Op.MIN
    sides = [_extreme(inner, [algebra.bound(form) for form in side]) for side in (one, two)]
    return (algebra.form(simplify(binary(op, *sides))),)


def _alternatives_alike(algebra: Algebra, one: Piece, two: Piece) -> Piece | None:
    """As `_alternatives`, of pieces with one side in common."""
    alike = set(one.firsts) == set(two.firsts) or set(one.ends) == set(two.ends)
    return _alternatives(algebra, one, two) if alike else None


def _alternatives(algebra: Algebra, one: Piece, two: Piece) -> Piece | None:
    """Two pieces of which every row has at most one, as one piece whose bounds depend on the row."""
    if one.exact is not two.exact:
        return None
    chosen = _excluding(one.conditions, two.conditions)
    if chosen is None:
        return None
    shared = tuple(c for c in one.conditions if c in two.conditions)
    other_chosen = opposite(chosen)
    mine = tuple(c for c in one.conditions if c not in shared and c is not chosen)
    other = tuple(c for c in two.conditions if c not in shared and c is not other_chosen)
    firsts = one.firsts
    if set(one.firsts) != set(two.firsts):
        sides = [first_of(algebra, piece) for piece in (one, two)]
        firsts = (algebra.form(simplify(where(chosen, *sides))),)
    ends = one.ends
    if mine or other or set(one.ends) != set(two.ends):
        sides = [end_of(algebra, Piece((), piece.ends, own)) for piece, own in ((one, mine), (two, other))]
        ends = (algebra.form(simplify(where(chosen, *sides))),)
    return Piece(firsts, ends, shared, one.exact)


def _excluding(one: tuple[Expr, ...], two: tuple[Expr, ...]) -> Expr | None:
    """A condition of the first that no row of the second meets."""
    for condition in one:
        if opposite(condition) in two:
            return condition
        if any(_are_different_numbers(condition, other) for other in two):
            return condition
    return None


def _are_different_numbers(a: Expr, b: Expr) -> bool:
    """Whether `x == 1` and `x == 2` are asked of one x."""
    if not a.op is b.op is Op.EQ or a.args[0] is not b.args[0]:
        return False
    return a.args[1].op is b.args[1].op is Op.CONST and a.args[1] is not b.args[1]
