"""Bounds of float operations, in 64 bits, widened outward to hold what 32-bit arithmetic may round to.

Bounds of `(-inf, inf)` also stand for NaN, and only these do: an operation on such an operand, or one that
gives NaN at a corner, has such bounds again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from flexc.ir.arrays import Array, Namespace, convert
from flexc.ir.expr import Expr
from flexc.ir.interval_types import Bounds
from flexc.ir.ops import Op

Rule = Callable[[Namespace, Expr, tuple[Bounds, ...]], Bounds]

_F32_MAX = float(np.finfo(np.float32).max)
_F32_TINY = float(np.finfo(np.float32).tiny)
_ROUND_OFF = 2.0**-22  # four times the rounding of one 32-bit operation
_APPROXIMATE = 2.0**-10  # hardware's tanh is within 2**-11, its other functions much closer


def _widest(xp: Namespace) -> Bounds:
    ends = (-math.inf, math.inf)
    return Bounds(*((np.float64(e) if xp is np else xp.tensor(e, dtype=xp.float64)) for e in ends))


def _widened(xp: Namespace, x: Bounds, relative: float, absolute: float = 2 * _F32_TINY) -> Bounds:
    """`x` with its ends moved outward: to infinity beyond the 32-bit range, widest where an end is NaN."""
    lo = xp.where(xp.isinf(x.lo), x.lo, x.lo - xp.abs(x.lo) * relative - absolute)
    hi = xp.where(xp.isinf(x.hi), x.hi, x.hi + xp.abs(x.hi) * relative + absolute)
    bad = xp.isnan(lo) | xp.isnan(hi)
    least, greatest = _widest(xp)
    lo = xp.where(bad | (lo < -_F32_MAX), least, xp.clip(lo, None, _F32_MAX))
    hi = xp.where(bad | (hi > _F32_MAX), greatest, xp.clip(hi, -_F32_MAX, None))
    return Bounds(lo, hi)


def rounded(xp: Namespace, x: Bounds) -> Bounds:
    """Numbers as 32-bit floats: an end that 32 bits hold stays, others move outward.

    Sound for one rounding (an exact sum or product, a conversion), since rounding is monotone.
    """
    wide = _widened(xp, x, _ROUND_OFF)
    return Bounds(
        xp.where(_is_single(xp, x.lo) & ~xp.isnan(x.hi), x.lo, wide.lo),
        xp.where(_is_single(xp, x.hi) & ~xp.isnan(x.lo), x.hi, wide.hi),
    )


def _is_single(xp: Namespace, x: Array) -> Array:
    """Whether 32 bits hold the number, as zero or a normal float."""
    size = xp.abs(x)
    single = convert(xp, convert(xp, x, xp.float32), xp.float64) == x
    return single & ((size == 0) | ((size >= _F32_TINY) & (size <= _F32_MAX)))


def float_literal(xp: Namespace, value: Array) -> Bounds:
    """A literal or captured number: as it is, and as 32 bits hold it."""
    number = float(value)
    if math.isnan(number):
        return _widest(xp)
    with np.errstate(all="ignore"):
        single = float(np.float32(number))
    ends = (min(number, single), max(number, single))
    return Bounds(*((np.float64(e) if xp is np else xp.tensor(e, dtype=xp.float64)) for e in ends))


def _maybe_nan(xp: Namespace, x: Bounds) -> Array:
    return xp.isinf(x.lo) & xp.isinf(x.hi) & (x.lo < x.hi)


def _result(xp: Namespace, args: tuple[Bounds, ...], x: Bounds) -> Bounds:
    """`x`, widest where it or an operand may be NaN."""
    bad = xp.isnan(x.lo) | xp.isnan(x.hi)
    for arg in args:
        bad = bad | _maybe_nan(xp, arg)
    widest = _widest(xp)
    return Bounds(xp.where(bad, widest.lo, x.lo), xp.where(bad, widest.hi, x.hi))


def _approximate(xp: Namespace, args: tuple[Bounds, ...], x: Bounds) -> Bounds:
    """What hardware may give for a function whose exact bounds are `x`."""
    return _result(xp, args, _widened(xp, x, _APPROXIMATE, 2.0**-20))


def _hull(xp: Namespace, corners: list[Array]) -> Bounds:
    lo = hi = corners[0]
    for corner in corners[1:]:  # minimum and maximum keep a NaN
        lo, hi = xp.minimum(lo, corner), xp.maximum(hi, corner)
    return Bounds(lo, hi)


def _add(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return _result(xp, args, rounded(xp, Bounds(a.lo + b.lo, a.hi + b.hi)))


def _sub(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return _result(xp, args, rounded(xp, Bounds(a.lo - b.hi, a.hi - b.lo)))


def _mul(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    if node.args[0] is node.args[1]:
        low, high = _magnitude(xp, a)
        return _result(xp, args, rounded(xp, Bounds(low * low, high * high)))
    corners = [a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi]
    return _result(xp, args, rounded(xp, _hull(xp, corners)))


def _div(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    has_zero = (b.lo <= 0) & (b.hi >= 0)
    quotient = _hull(xp, [a.lo / b.lo, a.lo / b.hi, a.hi / b.lo, a.hi / b.hi])
    widest = _widest(xp)
    safe = Bounds(xp.where(has_zero, widest.lo, quotient.lo), xp.where(has_zero, widest.hi, quotient.hi))
    return _result(xp, args, _widened(xp, safe, _ROUND_OFF))  # a GPU's division is not exact


def _neg(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return Bounds(-args[0].hi, -args[0].lo)


def _magnitude(xp: Namespace, x: Bounds) -> Bounds:
    low = xp.maximum(xp.maximum(x.lo, -x.hi), xp.zeros_like(x.lo))
    return Bounds(low, xp.maximum(-x.lo, x.hi))


def _abs(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return _result(xp, args, _magnitude(xp, args[0]))


def _min(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return _result(xp, args, Bounds(xp.minimum(a.lo, b.lo), xp.minimum(a.hi, b.hi)))


def _max(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return _result(xp, args, Bounds(xp.maximum(a.lo, b.lo), xp.maximum(a.hi, b.hi)))


def _increasing(name: str) -> Rule:
    """The rule of a function that grows with its operand; NaN at an end (a negative root) says nothing."""

    def rule(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
        function = getattr(xp, name)
        return _approximate(xp, args, Bounds(function(args[0].lo), function(args[0].hi)))

    return rule


def _floor(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return _result(xp, args, Bounds(xp.floor(args[0].lo), xp.floor(args[0].hi)))


def _sign(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return _result(xp, args, Bounds(xp.sign(args[0].lo), xp.sign(args[0].hi)))


def _rsqrt(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    """Falls with its operand; zero may be -0.0, whose result is -inf, and says nothing."""
    x = args[0]
    lo, hi = 1 / xp.sqrt(x.hi), 1 / xp.sqrt(x.lo)
    positive, widest = x.lo > 0, _widest(xp)
    return _approximate(
        xp, args, Bounds(xp.where(positive, lo, widest.lo), xp.where(positive, hi, widest.hi))
    )


def _sigmoid(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    x = args[0]
    return _approximate(xp, args, Bounds(1 / (1 + xp.exp(-x.lo)), 1 / (1 + xp.exp(-x.hi))))


def _erf(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    """By the sign only: numpy has no erf, and masks do not use it."""
    x = args[0]
    zero, one = xp.zeros_like(x.lo), xp.ones_like(x.lo)
    lo = xp.where(x.lo >= 0, zero, -one)
    hi = xp.where(x.hi <= 0, zero, one)
    return _approximate(xp, args, Bounds(lo, hi))


def _wave(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    """SIN and COS: -1 to 1, and NaN of an infinity."""
    x = args[0]
    infinite = xp.isinf(x.lo) | xp.isinf(x.hi)
    one = xp.ones_like(x.lo)
    widest = _widest(xp)
    bounds = Bounds(xp.where(infinite, widest.lo, -one), xp.where(infinite, widest.hi, one))
    return _approximate(xp, args, bounds)


def _pow(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    """Tight for a positive base, where the corners are the extremes; others say nothing."""
    a, b = args
    positive = (a.lo > 0) & ~xp.isinf(a.hi) & ~xp.isinf(b.lo) & ~xp.isinf(b.hi)
    one = xp.ones_like(a.lo)
    low, high = xp.where(positive, a.lo, one), xp.where(positive, a.hi, one)
    corners = _hull(xp, [low**b.lo, low**b.hi, high**b.lo, high**b.hi])
    widest = _widest(xp)
    lo = xp.where(positive, corners.lo, widest.lo)
    return _approximate(xp, args, Bounds(lo, xp.where(positive, corners.hi, widest.hi)))


FLOAT_RULES: dict[Op, Rule] = {
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.MUL: _mul,
    Op.NEG: _neg,
    Op.ABS: _abs,
    Op.MIN: _min,
    Op.MAX: _max,
    Op.SIGN: _sign,
    Op.DIV: _div,
    Op.POW: _pow,
    Op.EXP: _increasing("exp"),
    Op.EXP2: _increasing("exp2"),
    Op.LOG: _increasing("log"),
    Op.LOG2: _increasing("log2"),
    Op.SQRT: _increasing("sqrt"),
    Op.RSQRT: _rsqrt,
    Op.TANH: _increasing("tanh"),
    Op.SIGMOID: _sigmoid,
    Op.SIN: _wave,
    Op.COS: _wave,
    Op.ATAN: _increasing("arctan"),
    Op.ERF: _erf,
    Op.FLOOR: _floor,
    Op.DETACH: lambda xp, node, args: args[0],
}
