"""Functions that the expression language lacks, written in the ones that it has. All are of expressions."""

from __future__ import annotations

import math

from flexc.errors import DivisionByZero
from flexc.frontend.span import span_here
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.types import DType

F32 = DType.F32
INF = build.const(math.inf)


def f32(value: float) -> Expr:
    """A float literal."""
    return build.const(float(value))


def add(a: Expr, b: Expr) -> Expr:
    """`a + b`; of booleans: or, as in PyTorch."""
    if a.dtype is DType.BOOL and b.dtype is DType.BOOL:
        return build.logic(Op.OR, a, b)
    return build.binary(Op.ADD, a, b)


def sub(a: Expr, b: Expr) -> Expr:
    """`a - b`."""
    return build.binary(Op.SUB, a, b)


def mul(a: Expr, b: Expr) -> Expr:
    """`a * b`; of booleans: and, as in PyTorch."""
    if a.dtype is DType.BOOL and b.dtype is DType.BOOL:
        return build.logic(Op.AND, a, b)
    return build.binary(Op.MUL, a, b)


def div(a: Expr, b: Expr) -> Expr:
    """Float division."""
    return build.binary(Op.DIV, a, b)


def neg(x: Expr) -> Expr:
    """`-x`."""
    return build.unary(Op.NEG, x)


def absolute(x: Expr) -> Expr:
    """`|x|`."""
    return build.unary(Op.ABS, x)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger."""
    return build.binary(Op.MAX, a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller."""
    return build.binary(Op.MIN, a, b)


def less(a: Expr, b: Expr) -> Expr:
    """`a < b`."""
    return build.compare(Op.LT, a, b)


def equal(a: Expr, b: Expr) -> Expr:
    """`a == b`."""
    return build.compare(Op.EQ, a, b)


def exp(x: Expr) -> Expr:
    """The exponential."""
    return build.unary(Op.EXP, x)


def log(x: Expr) -> Expr:
    """The natural logarithm."""
    return build.unary(Op.LOG, x)


def floor(x: Expr) -> Expr:
    """The integer below; integers are their own."""
    return build.unary(Op.FLOOR, x) if x.dtype is F32 else x


def ceil(x: Expr) -> Expr:
    """The integer above."""
    return neg(floor(neg(x))) if x.dtype is F32 else x


def trunc(x: Expr) -> Expr:
    """The integer toward zero."""
    return build.where(less(x, f32(0)), ceil(x), floor(x)) if x.dtype is F32 else x


def round_half_even(x: Expr) -> Expr:
    """The nearest integer, ties to the even one."""
    if x.dtype is not F32:
        return x
    below = floor(x)
    part = sub(x, below)
    odd = equal(sub(below, mul(f32(2), floor(mul(below, f32(0.5))))), f32(1))
    up = build.logic(Op.OR, less(f32(0.5), part), build.logic(Op.AND, equal(part, f32(0.5)), odd))
    return build.where(up, add(below, f32(1)), below)


def floor_divide(a: Expr, b: Expr) -> Expr:
    """Division rounded down, of integers or floats."""
    _check_divisor(a, b)
    return build.binary(Op.FLOORDIV, a, b)


def _check_divisor(a: Expr, b: Expr) -> None:
    """Floats have infinities to say it with; integers have not."""
    if F32 not in (a.dtype, b.dtype) and b.op is Op.CONST and not b.attr:
        raise DivisionByZero("an integer is divided by 0", hint="divide by another number", span=span_here())


def trunc_divide(a: Expr, b: Expr) -> Expr:
    """Division rounded toward zero, of integers or floats."""
    if F32 in (a.dtype, b.dtype):
        return trunc(div(a, b))
    _check_divisor(a, b)
    sign = mul(build.unary(Op.SIGN, a), build.unary(Op.SIGN, b))
    return mul(floor_divide(absolute(a), absolute(b)), sign)


def remainder(a: Expr, b: Expr) -> Expr:
    """The remainder that has the sign of `b`."""
    _check_divisor(a, b)
    return build.binary(Op.MOD, a, b)


def fmod(a: Expr, b: Expr) -> Expr:
    """The remainder that has the sign of `a`."""
    return sub(a, mul(trunc_divide(a, b), b))


def power(a: Expr, b: Expr) -> Expr:
    """`a ** b`: products for small literal exponents, exact for integers."""
    if b.op is Op.CONST and b.attr in (1, 2, 3):
        result = a
        for _ in range(int(b.attr) - 1):
            result = mul(result, a)
        return result
    if F32 not in (a.dtype, b.dtype):
        return _integer_power(a, b)
    if b.op is Op.CONST and b.attr == 0.5:
        return build.unary(Op.SQRT, a)
    if b.op is Op.CONST and b.attr == -1.0:
        return div(f32(1), a)
    if a.op is Op.CONST and a.attr == 2:
        return build.unary(Op.EXP2, b)
    return build.binary(Op.POW, a, b)


def _integer_power(a: Expr, b: Expr) -> Expr:
    """By squaring over the bits of the exponent.

    One past 63 acts as 62 or 63 (0, 1 and -1 are right, others wrap).
    """
    a, b = build.unify(a, b, least=DType.I32)
    big = build.const(63)
    exponent = build.where(less(big, b), add(build.const(62), build.binary(Op.BIT_AND, b, build.const(1))), b)
    result: Expr = build.const(1, a.dtype)
    factor = a
    for bit in range(6):
        one = build.binary(Op.BIT_AND, build.binary(Op.SHR, exponent, build.const(bit)), build.const(1))
        result = mul(result, build.where(equal(one, build.const(1)), factor, build.const(1, a.dtype)))
        factor = mul(factor, factor)
    unit = equal(absolute(a), build.const(1))
    reciprocal = build.where(unit, result, build.const(0, a.dtype))
    return build.where(less(b, build.const(0)), reciprocal, result)


def log1p(x: Expr) -> Expr:
    """log(1 + x), accurate near 0: the rounding of 1 + x is divided out."""
    x = build.cast(x, F32)
    u = add(f32(1), x)
    exact = build.logic(Op.OR, equal(u, f32(1)), equal(u, INF))
    return build.where(exact, x, div(mul(log(u), x), sub(u, f32(1))))


def expm1(x: Expr) -> Expr:
    """exp(x) - 1, accurate near 0: the rounding of exp(x) is divided out."""
    x = build.cast(x, F32)
    u = exp(x)
    difference = sub(u, f32(1))
    plain = build.logic(Op.OR, less(u, f32(0.5)), less(f32(2), u))
    near = build.where(equal(u, f32(1)), x, div(mul(difference, x), log(u)))
    return build.where(plain, difference, near)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return build.unary(Op.SIGMOID, x)


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent."""
    return build.unary(Op.TANH, x)


def gelu_erf(x: Expr) -> Expr:
    """X times the normal distribution function."""
    inner = add(f32(1), build.unary(Op.ERF, mul(x, f32(math.sqrt(0.5)))))
    return mul(mul(x, f32(0.5)), inner)


def gelu_tanh(x: Expr) -> Expr:
    """The approximation of gelu by tanh."""
    inner = mul(f32(math.sqrt(2 / math.pi)), add(x, mul(f32(0.044715), mul(x, mul(x, x)))))
    return mul(mul(x, f32(0.5)), add(f32(1), tanh(inner)))


def logaddexp(a: Expr, b: Expr) -> Expr:
    """log(exp(a) + exp(b)), without overflow; equal operands may be infinite."""
    a, b = build.cast(a, F32), build.cast(b, F32)
    general = add(maximum(a, b), log1p(exp(neg(absolute(sub(a, b))))))
    half = f32(0.5)  # of each, so that each has half of the gradient
    same = add(add(mul(a, half), mul(b, half)), f32(math.log(2)))
    return build.where(equal(a, b), same, general)


def softplus(x: Expr) -> Expr:
    """log(1 + exp(x)), without overflow: beyond 40 it is x to 64-bit accuracy."""
    return build.where(less(f32(40), x), x, log1p(exp(x)))


def relu(x: Expr) -> Expr:
    """The larger of x and 0; at 0 its derivative is 0, where that of a maximum is shared."""
    zero = build.const(0)
    return build.where(build.compare(Op.LE, x, zero), zero, x)


def raised(x: Expr, bound: Expr) -> Expr:
    """The larger of the two; where they are equal, the gradient is that of `x`, as torch.clamp has it."""
    return maximum(x, bound) if _has_plain_bound(x, bound) else build.where(less(x, bound), bound, x)


def lowered(x: Expr, bound: Expr) -> Expr:
    """The smaller of the two; where they are equal, the gradient is that of `x`, as torch.clamp has it."""
    return minimum(x, bound) if _has_plain_bound(x, bound) else build.where(less(bound, x), bound, x)


def _has_plain_bound(x: Expr, bound: Expr) -> bool:
    """Whether the adjoint of a minimum or maximum does the same: of numbers, and where nothing has one."""
    return F32 not in (x.dtype, bound.dtype) or bound.op in (Op.CONST, Op.SCALAR)


def hardtanh(x: Expr, low: Expr, high: Expr) -> Expr:
    """`x` between two bounds; at and beyond them its derivative is 0, where torch.clamp has 1 at them."""
    if x.dtype is not F32:
        return minimum(maximum(x, low), high)
    below, above = build.compare(Op.LE, x, low), build.compare(Op.LE, high, x)
    return build.where(below, low, build.where(above, high, x))


def hardswish(x: Expr) -> Expr:
    """`x` times a line from 0 at -3 to 1 at 3; at and beyond these its derivative is 0 and 1."""
    middle = div(mul(x, add(x, f32(3))), f32(6))
    below, above = build.compare(Op.LE, x, f32(-3)), build.compare(Op.LE, f32(3), x)
    return build.where(below, f32(0), build.where(above, x, middle))


def selu(x: Expr) -> Expr:
    """The elu that keeps mean and variance."""
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return build.where(less(f32(0), x), mul(x, f32(scale)), mul(f32(scale * alpha), expm1(x)))


def hardshrink(x: Expr, width: Expr) -> Expr:
    """`x`, and 0 within `width` of 0."""
    small = build.logic(Op.AND, build.compare(Op.LE, neg(width), x), build.compare(Op.LE, x, width))
    return build.where(small, f32(0), x)


def softshrink(x: Expr, width: Expr) -> Expr:
    """`x` nearer to 0 by `width`, and 0 within `width` of 0."""
    below = build.where(less(x, neg(width)), add(x, width), f32(0))
    return build.where(less(width, x), sub(x, width), below)


def copysign(a: Expr, b: Expr) -> Expr:
    """The size of `a` with the sign of `b`, whose -0.0 counts as 0."""
    size = absolute(build.cast(a, F32))
    return build.where(less(b, build.const(0)), neg(size), size)


def fmax(a: Expr, b: Expr) -> Expr:
    """The larger, or the one that is a number; where they are equal, the gradient is that of `a`."""
    return build.where(build.logic(Op.OR, build.compare(Op.LE, b, a), is_nan(b)), a, b)


def fmin(a: Expr, b: Expr) -> Expr:
    """The smaller, or the one that is a number; where they are equal, the gradient is that of `a`."""
    return build.where(build.logic(Op.OR, build.compare(Op.LE, a, b), is_nan(b)), a, b)


def xlogy(a: Expr, b: Expr) -> Expr:
    """`a log(b)`, and 0 where a is 0 and the logarithm infinite or NaN; b = NaN gives NaN."""
    zero, b = build.const(0), build.cast(b, F32)
    no_product = build.logic(Op.OR, build.compare(Op.LE, b, zero), equal(b, INF))
    return build.where(build.logic(Op.AND, equal(a, zero), no_product), f32(0), mul(a, log(b)))


def is_nan(x: Expr) -> Expr:
    """Whether x is NaN; integers never are."""
    return build.compare(Op.NE, x, x) if x.dtype is F32 else build.FALSE


def is_infinite(x: Expr) -> Expr:
    """Whether x is infinite."""
    return equal(absolute(x), INF) if x.dtype is F32 else build.FALSE


def is_finite(x: Expr) -> Expr:
    """Whether x is neither NaN nor infinite."""
    return less(absolute(x), INF) if x.dtype is F32 else build.TRUE
