"""How far from zero a score can get, whatever q and k hold.

A soft cap, a clamp or a sigmoid holds scores within numbers that are known before a key is looked at. NaN is
no number: it stays what it is in every sum, and nothing is said of it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flexc.ir.expr import Expr, fold
from flexc.ir.ops import Op
from flexc.ir.types import DType


class Span(NamedTuple):
    """Inclusive least and greatest of a float, infinite where nothing is known."""

    lo: float
    hi: float


_ANY = Span(-math.inf, math.inf)


def score_extent(score: Expr, values: Sequence[object] = ()) -> float:
    """The largest `abs(score)` that there can be; infinity if none is known.

    `values` are the captures by slot: of them, Python numbers are looked at. Without, only literals are
    known.
    The bounds are those of real arithmetic, which floats may exceed by some last places.
    """
    span = fold([score], lambda node, args: _span(node, args, values))[score]
    extent = max(-span.lo, span.hi)
    return math.inf if math.isnan(extent) else extent


def _span(node: Expr, args: tuple[Span, ...], values: Sequence[object]) -> Span:
    if node.op is Op.CONST:
        return _number(node.attr)
    if node.op is Op.SCALAR:
        slot = node.attr
        return _number(values[slot]) if isinstance(slot, int) and slot < len(values) else _ANY
    if not node.dtype.is_float:  # integers wrap
        return _ANY
    if node.op is Op.CAST:
        return Span(0.0, 1.0) if node.args[0].dtype is DType.BOOL else args[0]
    rule = _RULES.get(node.op)
    found = _ANY if rule is None else rule(*args)
    return _ANY if math.isnan(found.lo) or math.isnan(found.hi) else found


def _number(value: object) -> Span:
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    return Span(float(value), float(value)) if is_finite else _ANY  # type: ignore[arg-type]


def _product(a: Span, b: Span) -> Span:
    ends = [x * y if x and y else 0.0 for x in a for y in b]
    return Span(min(ends), max(ends))


def _quotient(a: Span, b: Span) -> Span:
    if b.lo <= 0.0 <= b.hi:
        return _ANY
    return _product(a, Span(1.0 / b.hi, 1.0 / b.lo))


def _absolute(a: Span) -> Span:
    least = 0.0 if a.lo <= 0.0 <= a.hi else min(abs(a.lo), abs(a.hi))
    return Span(least, max(abs(a.lo), abs(a.hi)))


def _union(_condition: Span, a: Span, b: Span) -> Span:
    return Span(min(a.lo, b.lo), max(a.hi, b.hi))


def _unit(_: Span) -> Span:
    return Span(-1.0, 1.0)


_RULES: dict[Op, Callable[..., Span]] = {
    Op.ADD: lambda a, b: Span(a.lo + b.lo, a.hi + b.hi),
    Op.SUB: lambda a, b: Span(a.lo - b.hi, a.hi - b.lo),
    Op.MUL: _product,
    Op.DIV: _quotient,
    Op.NEG: lambda a: Span(-a.hi, -a.lo),
    Op.ABS: _absolute,
    Op.MIN: lambda a, b: Span(min(a.lo, b.lo), min(a.hi, b.hi)),
    Op.MAX: lambda a, b: Span(max(a.lo, b.lo), max(a.hi, b.hi)),
    Op.SIGN: _unit,
    Op.TANH: lambda a: Span(math.tanh(a.lo), math.tanh(a.hi)),
    Op.SIGMOID: lambda _: Span(0.0, 1.0),
    Op.SIN: _unit,
    Op.COS: _unit,
    Op.ATAN: lambda a: Span(math.atan(a.lo), math.atan(a.hi)),
    Op.ERF: _unit,
    Op.WHERE: _union,
    Op.DETACH: lambda a: a,
}
"""What is missing here has no bounds."""
