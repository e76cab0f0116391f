"""Inverses of trigonometric and hyperbolic functions, accurate near 0 and where squares overflow.

All are of expressions. Odd ones of hyperbolic functions are computed of `|x|` and given its sign by choices,
so that the derivative at 0 is theirs: that of an absolute value is 0 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flexc.frontend import math_forms as forms
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.types import DType

_ONE = forms.f32(1)
_LARGE = forms.f32(2.0**30)
"""From here on `sqrt(x * x + 1)` is x to 64-bit accuracy; the square is finite in 32 bits up to 2^63."""


def asinh(x: Expr) -> Expr:
    """log(x + sqrt(x^2 + 1))."""
    return _odd(x, _asinh_of_positive)


def _asinh_of_positive(x: Expr) -> Expr:
    square = forms.mul(x, x)
    root = _root_of(forms.add(square, _ONE))
    near = forms.log1p(forms.add(x, forms.div(square, forms.add(root, _ONE))))
    return build.where(forms.less(x, _LARGE), near, _log_of_double(x))


def acosh(x: Expr) -> Expr:
    """log(x + sqrt(x^2 - 1)); NaN below 1."""
    x = build.cast(x, DType.F32)
    above = forms.sub(x, _ONE)
    root = forms.mul(_root_of(above), _root_of(forms.add(x, _ONE)))
    near = forms.log1p(forms.add(above, root))
    return build.where(forms.less(x, _LARGE), near, _log_of_double(x))


def atanh(x: Expr) -> Expr:
    """Half of log((1 + x) / (1 - x)); NaN beyond 1."""
    return _odd(x, _atanh_of_positive)


def _atanh_of_positive(x: Expr) -> Expr:
    ratio = forms.div(forms.add(x, x), forms.sub(_ONE, x))
    return forms.mul(forms.f32(0.5), forms.log1p(ratio))


def asin(x: Expr) -> Expr:
    """The angle with this sine; NaN beyond 1."""
    x = build.cast(x, DType.F32)
    return _atan(forms.div(x, _root_of(forms.mul(forms.sub(_ONE, x), forms.add(_ONE, x)))))


def acos(x: Expr) -> Expr:
    """The angle with this cosine; NaN beyond 1."""
    x = build.cast(x, DType.F32)
    half = _atan(_root_of(forms.div(forms.sub(_ONE, x), forms.add(_ONE, x))))
    return forms.add(half, half)


def atan2(y: Expr, x: Expr) -> Expr:
    """The angle of the point (x, y); -0.0 counts as 0, and the origin has the angle 0 and no derivative."""
    y, x = build.cast(y, DType.F32), build.cast(x, DType.F32)
    zero = forms.f32(0)
    turn = build.where(forms.less(x, zero), forms.copysign(forms.f32(math.pi), y), zero)
    flat = forms.add(_atan(forms.div(y, x)), turn)
    steep = forms.sub(forms.copysign(forms.f32(math.pi / 2), y), _atan(forms.div(x, y)))
    is_steep = forms.less(forms.absolute(x), forms.absolute(y))
    is_origin = build.logic(Op.AND, forms.equal(x, zero), forms.equal(y, zero))
    return build.where(is_origin, zero, build.where(is_steep, steep, flat))


def _atan(x: Expr) -> Expr:
    return build.unary(Op.ATAN, x)


def _root_of(x: Expr) -> Expr:
    return build.unary(Op.SQRT, x)


def _log_of_double(x: Expr) -> Expr:
    return forms.add(forms.log(x), forms.f32(math.log(2)))


def _odd(x: Expr, of_positive: Callable[[Expr], Expr]) -> Expr:
    x = build.cast(x, DType.F32)
    negative = forms.less(x, forms.f32(0))
    value = of_positive(build.where(negative, forms.neg(x), x))
    return build.where(negative, forms.neg(value), value)
