"""Bounds of integer operations.

Rules take int64 bounds and give the bounds of the exact number; `in_range` turns a number that its type may
not hold into the widest bounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexc.ir.arrays import Array, Namespace, convert
from flexc.ir.expr import Expr
from flexc.ir.interval_types import Bounds
from flexc.ir.ops import Op
from flexc.ir.types import DType

_LEAST = {DType.I32: -(2**31), DType.I64: -(2**63)}
_GREATEST = {DType.I32: 2**31 - 1, DType.I64: 2**63 - 1}
_WIDTH = {DType.I32: 32, DType.I64: 64}


def full_range(xp: Namespace, dtype: DType) -> Bounds:
    """The bounds of any number of an integer type, 0-dim."""
    ends = (_LEAST[dtype], _GREATEST[dtype])
    return Bounds(*((np.int64(e) if xp is np else xp.tensor(e, dtype=xp.int64)) for e in ends))


def in_range(xp: Namespace, dtype: DType, x: Bounds) -> Bounds:
    """`x`, widest where it leaves a 32-bit type: the value may have wrapped there."""
    if dtype is not DType.I32:
        return x
    widest = full_range(xp, dtype)
    fits = (x.lo >= widest.lo) & (x.hi <= widest.hi)
    if xp is np and fits.all():  # on a GPU this test would wait for the device
        return x
    return Bounds(xp.where(fits, x.lo, widest.lo), xp.where(fits, x.hi, widest.hi))


def _widest_unless(xp: Namespace, good: Array, node: Expr, x: Bounds) -> Bounds:
    widest = full_range(xp, node.dtype)
    return Bounds(xp.where(good, x.lo, widest.lo), xp.where(good, x.hi, widest.hi))


def _hull(xp: Namespace, corners: list[Array]) -> Bounds:
    lo = hi = corners[0]
    for corner in corners[1:]:
        lo, hi = xp.minimum(lo, corner), xp.maximum(hi, corner)
    return Bounds(lo, hi)


def _small(xp: Namespace, node: Expr, *operands: Bounds) -> Array:
    """Whether sums and products of 64-bit operands stay far from wrapping; 32-bit ones always do."""
    if node.dtype is DType.I32:
        return True
    largest: Array = 1.0
    for operand in operands:
        low, high = (xp.abs(convert(xp, end, xp.float64)) for end in operand)
        largest = largest * xp.maximum(xp.maximum(low, high), xp.ones_like(low))
    return largest < 2.0**62


def _add(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return _checked(xp, node, args, Bounds(a.lo + b.lo, a.hi + b.hi))


def _sub(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return _checked(xp, node, args, Bounds(a.lo - b.hi, a.hi - b.lo))


def _checked(xp: Namespace, node: Expr, args: tuple[Bounds, ...], x: Bounds) -> Bounds:
    return x if node.dtype is DType.I32 else _widest_unless(xp, _small(xp, node, *args), node, x)


def _mul(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    if node.args[0] is node.args[1]:
        low, high = _abs(xp, node, args[:1])
        return _checked(xp, node, args, Bounds(low * low, high * high))
    corners = [a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi]
    return _checked(xp, node, args, _hull(xp, corners))


def _neg(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return _checked(xp, node, args, Bounds(-args[0].hi, -args[0].lo))


def _abs(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    x = args[0]
    zero = xp.zeros_like(x.lo)
    low = xp.maximum(xp.maximum(x.lo, -x.hi), zero)
    return _checked(xp, node, args, Bounds(low, xp.maximum(-x.lo, x.hi)))


def _min(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return Bounds(xp.minimum(a.lo, b.lo), xp.minimum(a.hi, b.hi))


def _max(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return Bounds(xp.maximum(a.lo, b.lo), xp.maximum(a.hi, b.hi))


def _sign(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return Bounds(xp.sign(args[0].lo), xp.sign(args[0].hi))


def _positive(xp: Namespace, x: Bounds) -> tuple[Array, Bounds]:
    """Whether the divisor is surely positive, and the divisor with 1 in place of what is not."""
    ones = xp.ones_like(x.lo)
    return x.lo > 0, Bounds(xp.maximum(x.lo, ones), xp.maximum(x.hi, ones))


def _floordiv(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    """Tight for a positive divisor, also one that varies; one that may be 0 or negative says nothing."""
    a, divisor = args
    positive, d = _positive(xp, divisor)
    if node.args[1].op is Op.CONST:
        quotient = Bounds(a.lo // d.lo, a.hi // d.lo)
    else:
        quotient = _hull(xp, [a.lo // d.lo, a.lo // d.hi, a.hi // d.lo, a.hi // d.hi])
    return _widest_unless(xp, positive, node, quotient)


def _mod(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    """Tight within one period of a known positive modulus; else 0 to the greatest possible remainder."""
    a, modulus = args
    positive, m = _positive(xp, modulus)
    low_period = a.lo // m.lo
    one_period = (m.lo == m.hi) & (low_period == a.hi // m.lo)
    start = low_period * m.lo
    unchanged = (a.lo >= 0) & (a.hi < m.lo)
    zero = xp.zeros_like(m.lo)
    most = xp.where(a.lo >= 0, xp.minimum(a.hi, m.hi - 1), m.hi - 1)
    lo = xp.where(one_period, a.lo - start, xp.where(unchanged, a.lo, zero))
    hi = xp.where(one_period, a.hi - start, xp.where(unchanged, a.hi, most))
    return _widest_unless(xp, positive, node, Bounds(lo, hi))


def _ones_above(xp: Namespace, x: Array) -> Array:
    """The least `2**k - 1` that is at least x, for x >= 0."""
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _bit_range(xp: Namespace, args: tuple[Bounds, ...]) -> tuple[Array, Bounds]:
    """Whether both operands are surely >= 0, and the bounds of all numbers of as many bits as theirs."""
    a, b = args
    nonnegative = (a.lo >= 0) & (b.lo >= 0)
    largest = a.hi
    for end in (b.hi, ~a.lo, ~b.lo):
        largest = xp.maximum(largest, end)
    ones = _ones_above(xp, xp.maximum(largest, xp.zeros_like(largest)))
    return nonnegative, Bounds(xp.where(nonnegative, xp.zeros_like(ones), ~ones), ones)


def _is_point(args: tuple[Bounds, ...]) -> Array:
    return (args[0].lo == args[0].hi) & (args[1].lo == args[1].hi)


def _exact_points(xp: Namespace, args: tuple[Bounds, ...], value: Array, x: Bounds) -> Bounds:
    """`x`, but the value itself where both operands are known."""
    known = _is_point(args)
    return Bounds(xp.where(known, value, x.lo), xp.where(known, value, x.hi))


def _bit_and(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    mask = node.args[1].attr if node.args[1].op is Op.CONST else None
    if isinstance(mask, int) and mask >= 0 and mask & (mask + 1) == 0 and mask < 2**31 - 1:
        modulus = xp.zeros_like(args[1].lo) + (mask + 1)
        return _mod(xp, node, (args[0], Bounds(modulus, modulus)))
    if isinstance(mask, int) and mask < 0 and -mask & (-mask - 1) == 0:  # clears low bits: monotone
        return Bounds(args[0].lo & mask, args[0].hi & mask)
    a, b = args
    _, bits = _bit_range(xp, args)
    hi = xp.where(a.lo >= 0, xp.minimum(a.hi, bits.hi), bits.hi)
    hi = xp.where(b.lo >= 0, xp.minimum(b.hi, hi), hi)
    lo = xp.where((a.lo >= 0) | (b.lo >= 0), xp.zeros_like(bits.lo), bits.lo)
    return _exact_points(xp, args, a.lo & b.lo, Bounds(lo, hi))


def _bit_or(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    nonnegative, bits = _bit_range(xp, args)
    lo = xp.where(nonnegative, xp.maximum(a.lo, b.lo), bits.lo)
    return _exact_points(xp, args, a.lo | b.lo, Bounds(lo, bits.hi))


def _bit_xor(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    _, bits = _bit_range(xp, args)
    return _exact_points(xp, args, args[0].lo ^ args[1].lo, bits)


def _bit_not(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return Bounds(~args[0].hi, ~args[0].lo)


def _shift_amount(xp: Namespace, node: Expr, x: Bounds) -> tuple[Array, Bounds]:
    """Whether the count is surely one that the type allows, and the count with 0 in place of what is not."""
    good = (x.lo >= 0) & (x.hi < _WIDTH[node.dtype])
    zero = xp.zeros_like(x.lo)
    return good, Bounds(xp.where(good, x.lo, zero), xp.where(good, x.hi, zero))


def _shl(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    good, s = _shift_amount(xp, node, args[1])
    a = args[0]
    x = _hull(xp, [a.lo << s.lo, a.lo << s.hi, a.hi << s.lo, a.hi << s.hi])
    if node.dtype is DType.I64:
        powers = Bounds(*(xp.ones_like(end) << xp.minimum(end, end * 0 + 62) for end in s))
        good = good & (s.hi < 62) & _small(xp, node, a, powers)
    return _widest_unless(xp, good, node, x)


def _shr(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    good, s = _shift_amount(xp, node, args[1])
    a = args[0]
    x = _hull(xp, [a.lo >> s.lo, a.lo >> s.hi, a.hi >> s.lo, a.hi >> s.hi])
    return _widest_unless(xp, good, node, x)


INTEGER_RULES: dict[Op, Callable[[Namespace, Expr, tuple[Bounds, ...]], Bounds]] = {
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.MUL: _mul,
    Op.NEG: _neg,
    Op.ABS: _abs,
    Op.MIN: _min,
    Op.MAX: _max,
    Op.SIGN: _sign,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.BIT_AND: _bit_and,
    Op.BIT_OR: _bit_or,
    Op.BIT_XOR: _bit_xor,
    Op.BIT_NOT: _bit_not,
    Op.SHL: _shl,
    Op.SHR: _shr,
}
