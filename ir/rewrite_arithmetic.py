"""Exact rewriting rules of numbers: arithmetic, integer and bit operations, float functions, conversions.

A rule takes a node whose operands are simplified, literals last; it returns a smaller equal one or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flexc.ir.build import binary, cast, const, unary
from flexc.ir.expr import Expr, with_args
from flexc.ir.ops import Op
from flexc.ir.types import DType

_WIDTH = {DType.I32: 32, DType.I64: 64}


def literal(x: Expr) -> int | float | None:
    """The number that `x` is a literal of, else None (also for booleans)."""
    if x.op is Op.CONST and isinstance(x.attr, int | float) and x.dtype is not DType.BOOL:
        return x.attr
    return None


def _wrapped(value: int, dtype: DType) -> int:
    half = 1 << (_WIDTH[dtype] - 1)
    return (value + half) % (2 * half) - half


def _offset(x: Expr) -> tuple[Expr, int] | None:
    """`(y, c)` where `x` is the integer `y + c` or `y - c` with a literal c."""
    if x.op not in (Op.ADD, Op.SUB) or not x.dtype.is_integer:
        return None
    c = literal(x.args[1])
    if not isinstance(c, int):
        return None
    return x.args[0], c if x.op is Op.ADD else -c


def _merge_offsets(x: Expr) -> Expr | None:
    outer = _offset(x)
    inner = _offset(outer[0]) if outer is not None else None
    if outer is None or inner is None:
        return None
    total = _wrapped(outer[1] + inner[1], x.dtype)
    if total < 0 and total != _wrapped(-total, x.dtype):
        return binary(Op.SUB, inner[0], const(-total, x.dtype))
    return binary(Op.ADD, inner[0], const(total, x.dtype))


def _add(x: Expr) -> Expr | None:
    a, b = x.args
    if literal(b) == 0:
        return a
    if b.op is Op.NEG:
        return with_args(Expr(Op.SUB, x.args, None, x.dtype), (a, b.args[0]))
    if a.op is Op.NEG:
        return Expr(Op.SUB, (b, a.args[0]), None, x.dtype)
    if x.dtype.is_integer and a.op is Op.SUB and a.args[1] is b:
        return a.args[0]
    if x.dtype.is_integer and b.op is Op.SUB and b.args[1] is a:
        return b.args[0]
    return _merge_offsets(x)


def _sub(x: Expr) -> Expr | None:
    a, b = x.args
    if literal(b) == 0:
        return a
    if literal(a) == 0:
        return Expr(Op.NEG, (b,), None, x.dtype)
    if b.op is Op.NEG:
        return Expr(Op.ADD, (a, b.args[0]), None, x.dtype)
    if not x.dtype.is_integer:
        return None
    if a is b:
        return const(0, x.dtype)
    if b.op is Op.MUL and b.args[0].op is Op.FLOORDIV and b.args[0].args == (a, b.args[1]):
        return binary(Op.MOD, a, b.args[1])
    if a.op is Op.ADD and b in a.args:
        return a.args[1] if a.args[0] is b else a.args[0]
    return _merge_offsets(x)


def _mul(x: Expr) -> Expr | None:
    a, b = x.args
    factor = literal(b)
    if factor == 1:
        return a
    if factor == -1:
        return Expr(Op.NEG, (a,), None, x.dtype)
    if not isinstance(factor, int) or not x.dtype.is_integer:
        return None
    if factor == 0:
        return const(0, x.dtype)
    inner = literal(a.args[1]) if a.op is Op.MUL else None
    if isinstance(inner, int):
        return Expr(Op.MUL, (a.args[0], const(_wrapped(inner * factor, x.dtype), x.dtype)), None, x.dtype)
    return None


def _div(x: Expr) -> Expr | None:
    a, divisor = x.args[0], literal(x.args[1])
    if divisor is None or divisor == 0 or not math.isfinite(divisor):
        return None
    mantissa, exponent = math.frexp(divisor)
    if divisor == 1:
        return a
    if abs(mantissa) == 0.5 and abs(exponent) < 120:  # a power of two: its reciprocal is exact
        return binary(Op.MUL, a, const(1.0 / divisor, DType.F32))
    return None


def _floordiv(x: Expr) -> Expr | None:
    a, divisor = x.args[0], literal(x.args[1])
    if divisor == 1:
        return a
    inner = literal(a.args[1]) if a.op is Op.FLOORDIV else None
    if not isinstance(divisor, int) or not isinstance(inner, int) or min(divisor, inner) <= 0:
        return None
    product = divisor * inner
    if product != _wrapped(product, x.dtype):
        return None
    return binary(Op.FLOORDIV, a.args[0], const(product, x.dtype))


def _mod(x: Expr) -> Expr | None:
    a, b = x.args
    if literal(b) == 1:
        return const(0, x.dtype)
    return a if a.op is Op.MOD and a.args[1] is b and b.op is Op.CONST else None


def _neg(x: Expr) -> Expr | None:
    a = x.args[0]
    if a.op is Op.NEG:
        return a.args[0]
    if a.op is Op.SUB and x.dtype.is_integer:
        return Expr(Op.SUB, (a.args[1], a.args[0]), None, x.dtype)
    return None


def _abs(x: Expr) -> Expr | None:
    a = x.args[0]
    if a.op is Op.ABS:
        return a
    return unary(Op.ABS, a.args[0]) if a.op is Op.NEG else None


def _sign(x: Expr) -> Expr | None:
    return x.args[0] if x.args[0].op is Op.SIGN else None


def _extreme(x: Expr) -> Expr | None:
    """MIN and MAX: idempotence, absorption, literals of nested ones merged, infinities."""
    a, b = x.args
    other = Op.MAX if x.op is Op.MIN else Op.MIN
    neutral = math.inf if x.op is Op.MIN else -math.inf
    if a is b or literal(b) == neutral:
        return a
    for one, two in ((a, b), (b, a)):
        if one.op is x.op and two in one.args:
            return one
        if one.op is other and two in one.args:
            return two
    inner, outer = literal(a.args[1]) if a.op is x.op else None, literal(b)
    if inner is None or outer is None:
        return None
    merged = min(inner, outer) if x.op is Op.MIN else max(inner, outer)
    return Expr(x.op, (a.args[0], const(merged, x.dtype)), x.attr, x.dtype)


def _bit_and(x: Expr) -> Expr | None:
    a, b = x.args
    if a is b or literal(b) == -1:
        return a
    return b if literal(b) == 0 else None


def _bit_or(x: Expr) -> Expr | None:
    a, b = x.args
    if a is b or literal(b) == 0:
        return a
    return b if literal(b) == -1 else None


def _bit_xor(x: Expr) -> Expr | None:
    a, b = x.args
    if a is b:
        return const(0, x.dtype)
    return a if literal(b) == 0 else None


def _bit_not(x: Expr) -> Expr | None:
    return x.args[0].args[0] if x.args[0].op is Op.BIT_NOT else None


def _shift(x: Expr) -> Expr | None:
    return x.args[0] if literal(x.args[1]) == 0 else None


def _pow(x: Expr) -> Expr | None:
    a, exponent = x.args[0], literal(x.args[1])
    if exponent == 0:
        return const(1.0)
    if exponent == 1:
        return a
    return binary(Op.MUL, a, a) if exponent == 2 else None


def _floor(x: Expr) -> Expr | None:
    a = x.args[0]
    return a if a.op is Op.FLOOR or (a.op is Op.CAST and not a.args[0].dtype.is_float) else None


def _cast(x: Expr) -> Expr | None:
    """A conversion of a lossless conversion is one conversion."""
    a = x.args[0]
    if a.op is not Op.CAST:
        return None
    source, middle = a.args[0].dtype, a.dtype
    lossless = source is DType.BOOL or (source is DType.I32 and middle is DType.I64)
    return cast(a.args[0], x.dtype) if lossless else None


ARITHMETIC_RULES: dict[Op, Callable[[Expr], Expr | None]] = {
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.MUL: _mul,
    Op.DIV: _div,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.NEG: _neg,
    Op.ABS: _abs,
    Op.SIGN: _sign,
    Op.MIN: _extreme,
    Op.MAX: _extreme,
    Op.BIT_AND: _bit_and,
    Op.BIT_OR: _bit_or,
    Op.BIT_XOR: _bit_xor,
    Op.BIT_NOT: _bit_not,
    Op.SHL: _shift,
    Op.SHR: _shift,
    Op.POW: _pow,
    Op.FLOOR: _floor,
    Op.CAST: _cast,
}
