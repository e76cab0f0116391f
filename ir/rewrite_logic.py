"""Exact rewriting rules of comparisons, logic and choice.

A rule takes a node whose operands are simplified, literals last; it returns a smaller equal one or None.
"""

from __future__ import annotations

from collections.abc import Callable

from flexc.ir.build import FALSE, TRUE, cast, compare, logic, unary, where
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.rewrite_arithmetic import literal
from flexc.ir.types import DType


def negation(x: Expr) -> Expr | None:
    """The opposite of a boolean, where it is no larger than `x`: NOT removed, or a comparison turned."""
    if x is TRUE or x is FALSE:
        return FALSE if x is TRUE else TRUE
    if x.op is Op.NOT:
        return x.args[0]
    if x.op in (Op.EQ, Op.NE):
        return compare(Op.NE if x.op is Op.EQ else Op.EQ, *x.args)
    if x.op in (Op.LT, Op.LE) and not x.args[0].dtype.is_float:  # a NaN makes both false
        return compare(Op.LE if x.op is Op.LT else Op.LT, x.args[1], x.args[0])
    return None


def flatten(op: Op, x: Expr) -> list[Expr]:
    """The operands of nested ANDs or ORs, from left to right."""
    parts: list[Expr] = []
    stack = [x]
    while stack:
        node = stack.pop()
        if node.op is op:
            stack.extend(reversed(node.args))
        else:
            parts.append(node)
    return parts


def join(op: Op, parts: list[Expr]) -> Expr:
    """Nested ANDs or ORs of `parts`; of none, what changes nothing."""
    if not parts:
        return TRUE if op is Op.AND else FALSE
    whole = parts[0]
    for part in parts[1:]:
        whole = logic(op, whole, part)
    return whole


def _chain(x: Expr) -> Expr | None:
    """AND and OR: drop neutral, repeated and absorbed parts; a part beside its opposite decides the whole."""
    neutral, absorbing, dual = (TRUE, FALSE, Op.OR) if x.op is Op.AND else (FALSE, TRUE, Op.AND)
    sides = [flatten(x.op, arg) for arg in x.args]
    parts = sides[0] + sides[1]
    unique = [part for part in dict.fromkeys(parts) if part is not neutral]
    known = set(unique)
    # Each side has no opposites within itself, so that the shorter one is enough to look from.
    if absorbing in known or any(negation(part) in known for part in min(sides, key=len)):
        return absorbing
    kept = [p for p in unique if p.op is not dual or known.isdisjoint(flatten(dual, p))]
    return None if len(kept) == len(parts) else join(x.op, kept)


def _not(x: Expr) -> Expr | None:
    a = x.args[0]
    opposite = negation(a)
    if opposite is not None:
        return opposite
    if a.op not in (Op.AND, Op.OR):
        return None
    left, right = (negation(arg) for arg in a.args)
    if left is None or right is None:  # de Morgan would grow it
        return None
    return logic(Op.OR if a.op is Op.AND else Op.AND, left, right)


def _less(x: Expr) -> Expr | None:
    a, b = x.args
    if a is not b:
        return None
    if x.op is Op.LT:
        return FALSE
    return None if a.dtype.is_float else TRUE


def _equal(x: Expr) -> Expr | None:
    a, b = x.args
    if a is b and not a.dtype.is_float:
        return TRUE if x.op is Op.EQ else FALSE
    truth = _tested_truth(a, b)
    if truth is None:
        return None
    tested, value = truth
    return tested if value is (x.op is Op.EQ) else unary(Op.NOT, tested)


def _tested_truth(a: Expr, b: Expr) -> tuple[Expr, bool] | None:
    """`(c, v)` where `a == b` says that the boolean c is v: `c == True`, `int(c) == 0`."""
    if a.dtype is DType.BOOL and b.op is Op.CONST:
        return a, b is TRUE
    if a.op is Op.CAST and a.args[0].dtype is DType.BOOL and literal(b) in (0, 1):
        return a.args[0], literal(b) == 1
    return None


def _where(x: Expr) -> Expr | None:
    c, a, b = x.args
    if c is TRUE or a is b:
        return a
    if c is FALSE:
        return b
    if c.op is Op.NOT:
        return where(c.args[0], b, a)
    if a.op is Op.WHERE and a.args[0] is c:
        return where(c, a.args[1], b)
    if b.op is Op.WHERE and b.args[0] is c:
        return where(c, a, b.args[2])
    if a.op is Op.WHERE and a.args[2] is b:
        return where(logic(Op.AND, c, a.args[0]), a.args[1], b)
    if x.dtype is DType.BOOL:
        return _where_bool(c, a, b)
    return cast(c, x.dtype) if literal(a) == 1 and literal(b) == 0 else None


def _where_bool(c: Expr, a: Expr, b: Expr) -> Expr:
    if a is TRUE:
        return logic(Op.OR, c, b)
    if b is FALSE:
        return logic(Op.AND, c, a)
    opposite = unary(Op.NOT, c)
    if a is FALSE:
        return logic(Op.AND, opposite, b)
    if b is TRUE:
        return logic(Op.OR, opposite, a)
    return logic(Op.OR, logic(Op.AND, c, a), logic(Op.AND, opposite, b))


LOGIC_RULES: dict[Op, Callable[[Expr], Expr | None]] = {
    Op.AND: _chain,
    Op.OR: _chain,
    Op.NOT: _not,
    Op.LT: _less,
    Op.LE: _less,
    Op.EQ: _equal,
    Op.NE: _equal,
    Op.WHERE: _where,
}
