"""The table of elementwise operations: torch's names, expressions, result types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexc.frontend import inverses
from flexc.frontend import math_forms as forms
from flexc.frontend.elementwise import as_float, mapped, operation, promote
from flexc.frontend.proxy import OPERATIONS, Traced
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.types import DType

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

Form = Callable[..., Expr]


def _simple(op: Op) -> Form:
    return lambda x: build.unary(op, x)


def _reciprocal_of(form: Form) -> Form:
    return lambda x: forms.div(forms.f32(1), form(x))


def _hyperbolic(sign: Form) -> Form:
    return lambda x: forms.mul(forms.f32(0.5), sign(forms.exp(x), forms.exp(forms.neg(x))))


_FLOAT_FUNCTIONS: dict[str, Form] = {
    "exp": _simple(Op.EXP),
    "exp2": _simple(Op.EXP2),
    "expm1": forms.expm1,
    "log": _simple(Op.LOG),
    "log2": _simple(Op.LOG2),
    "log10": lambda x: forms.mul(forms.log(x), forms.f32(1 / math.log(10))),
    "log1p": forms.log1p,
    "sqrt": _simple(Op.SQRT),
    "rsqrt": _simple(Op.RSQRT),
    "tanh": _simple(Op.TANH),
    "sigmoid": forms.sigmoid,
    "expit": forms.sigmoid,
    "logit": lambda x: forms.log(forms.div(x, forms.sub(forms.f32(1), x))),
    "sin": _simple(Op.SIN),
    "cos": _simple(Op.COS),
    "tan": lambda x: forms.div(build.unary(Op.SIN, x), build.unary(Op.COS, x)),
    "sinh": _hyperbolic(forms.sub),
    "cosh": _hyperbolic(forms.add),
    "erf": _simple(Op.ERF),
    "erfc": lambda x: forms.sub(forms.f32(1), build.unary(Op.ERF, x)),
    "reciprocal": _reciprocal_of(lambda x: x),
    "silu": lambda x: forms.mul(x, forms.sigmoid(x)),
    "mish": lambda x: forms.mul(x, forms.tanh(forms.softplus(x))),
    "logsigmoid": lambda x: forms.neg(forms.softplus(forms.neg(x))),
    "log_sigmoid": lambda x: forms.neg(forms.softplus(forms.neg(x))),
    "softsign": lambda x: forms.div(x, forms.add(forms.f32(1), forms.absolute(x))),
    "tanhshrink": lambda x: forms.sub(x, forms.tanh(x)),
    "deg2rad": lambda x: forms.mul(x, forms.f32(math.pi / 180)),
    "rad2deg": lambda x: forms.mul(x, forms.f32(180 / math.pi)),
    "selu": forms.selu,
    "hardswish": forms.hardswish,
    "asinh": inverses.asinh,
    "arcsinh": inverses.asinh,
    "acosh": inverses.acosh,
    "arccosh": inverses.acosh,
    "atan": _simple(Op.ATAN),
    "arctan": _simple(Op.ATAN),
    "asin": inverses.asin,
    "arcsin": inverses.asin,
    "acos": inverses.acos,
    "arccos": inverses.acos,
    "atanh": inverses.atanh,
    "arctanh": inverses.atanh,
    "hardsigmoid": lambda x: forms.div(
        forms.hardtanh(forms.add(x, forms.f32(3)), forms.f32(0), forms.f32(6)), forms.f32(6)
    ),
}
_SAME_TYPE_FUNCTIONS: dict[str, Form] = {
    "neg": forms.neg,
    "negative": forms.neg,
    "positive": lambda x: x,
    "abs": forms.absolute,
    "absolute": forms.absolute,
    "fabs": forms.absolute,
    "sign": _simple(Op.SIGN),
    "sgn": _simple(Op.SIGN),
    "square": lambda x: forms.mul(x, x),
    "floor": forms.floor,
    "ceil": forms.ceil,
    "trunc": forms.trunc,
    "fix": forms.trunc,
    "frac": lambda x: forms.sub(x, forms.trunc(x)),
    "relu": forms.relu,
    "relu6": lambda x: forms.hardtanh(x, build.const(0), build.const(6)),
    "bitwise_not": lambda x: build.unary(Op.NOT if x.dtype is DType.BOOL else Op.BIT_NOT, x),
}
_PREDICATES: dict[str, Form] = {
    "isnan": forms.is_nan,
    "isinf": forms.is_infinite,
    "isfinite": forms.is_finite,
    "isneginf": lambda x: forms.equal(x, forms.neg(forms.INF)),
    "isposinf": lambda x: forms.equal(x, forms.INF),
    "signbit": lambda x: forms.less(x, build.const(0)),
    "logical_not": lambda x: build.unary(Op.NOT, x),
}


def _bits(logic: Op | None, op: Op) -> Form:
    """A bit operation of integers, a logic one of booleans."""

    def form(a: Expr, b: Expr) -> Expr:
        if a.dtype is DType.BOOL and b.dtype is DType.BOOL:
            return build.compare(Op.NE, a, b) if logic is None else build.logic(logic, a, b)
        return build.binary(op, a, b)

    return form


def _truth(x: Expr) -> Expr:
    return build.cast(x, DType.BOOL)


_SAME_TYPE_PAIRS: dict[str, Form] = {
    "mul": forms.mul,
    "multiply": forms.mul,
    "remainder": forms.remainder,
    "fmod": forms.fmod,
    "maximum": forms.maximum,
    "minimum": forms.minimum,
    "fmax": forms.fmax,
    "fmin": forms.fmin,
    "pow": forms.power,
    "bitwise_and": _bits(Op.AND, Op.BIT_AND),
    "bitwise_or": _bits(Op.OR, Op.BIT_OR),
    "bitwise_xor": _bits(None, Op.BIT_XOR),
    "bitwise_left_shift": lambda a, b: build.binary(Op.SHL, a, b),
    "bitwise_right_shift": lambda a, b: build.binary(Op.SHR, a, b),
    "floor_divide": forms.floor_divide,
}
_FLOAT_PAIRS: dict[str, Form] = {
    "true_divide": forms.div,
    "logaddexp": forms.logaddexp,
    "hypot": lambda a, b: build.unary(Op.SQRT, forms.add(forms.mul(a, a), forms.mul(b, b))),
    "xlogy": forms.xlogy,
    "copysign": forms.copysign,
    "atan2": inverses.atan2,
    "arctan2": inverses.atan2,
}
_COMPARISONS: dict[str, Form] = {
    "lt": forms.less,
    "le": lambda a, b: build.compare(Op.LE, a, b),
    "gt": lambda a, b: forms.less(b, a),
    "ge": lambda a, b: build.compare(Op.LE, b, a),
    "eq": forms.equal,
    "ne": lambda a, b: build.compare(Op.NE, a, b),
    "logical_and": lambda a, b: build.logic(Op.AND, a, b),
    "logical_or": lambda a, b: build.logic(Op.OR, a, b),
    "logical_xor": lambda a, b: build.compare(Op.NE, _truth(a), _truth(b)),
}
_OTHER_NAMES = {
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
}


def _unary(form: Form, result: Callable[[torch.dtype], torch.dtype]) -> Callable[..., Traced]:
    def operation(tracer: Tracer, input: Any, inplace: bool = False) -> Traced:
        x = tracer.lift(input)
        return mapped(tracer, form, (x,), result(x.dtype))

    return operation


def _binary(form: Form, result: Callable[[torch.dtype], torch.dtype]) -> Callable[..., Traced]:
    def operation(tracer: Tracer, input: Any, other: Any) -> Traced:
        pair = (tracer.lift(input), tracer.lift(other))
        return mapped(tracer, form, pair, result(promote(*pair)))

    return operation


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _bool(dtype: torch.dtype) -> torch.dtype:
    return torch.bool


def _install() -> None:
    for table, make, result in (
        (_FLOAT_FUNCTIONS, _unary, as_float),
        (_SAME_TYPE_FUNCTIONS, _unary, _same),
        (_PREDICATES, _unary, _bool),
        (_SAME_TYPE_PAIRS, _binary, _same),
        (_FLOAT_PAIRS, _binary, as_float),
        (_COMPARISONS, _binary, _bool),
    ):
        for name, form in table.items():
            OPERATIONS[name] = make(form, result)
    for name, same in _OTHER_NAMES.items():
        OPERATIONS[name] = OPERATIONS[same]
    power = OPERATIONS["pow"]
    OPERATIONS["pow"] = lambda tracer, input, exponent: power(tracer, input, exponent)


_install()


@operation("add")
def add(tracer: Tracer, input: Any, other: Any, *, alpha: Any = 1) -> Traced:
    """torch.add."""
    return _scaled(tracer, forms.add, input, other, alpha)


@operation("sub", "subtract")
def sub(tracer: Tracer, input: Any, other: Any, *, alpha: Any = 1) -> Traced:
    """torch.sub."""
    return _scaled(tracer, forms.sub, input, other, alpha)


@operation("rsub")
def rsub(tracer: Tracer, input: Any, other: Any, *, alpha: Any = 1) -> Traced:
    """torch.rsub."""
    return _scaled(tracer, forms.sub, other, input, alpha)


def _scaled(tracer: Tracer, form: Form, a: Any, b: Any, alpha: Any) -> Traced:
    if not (type(alpha) is int and alpha == 1):
        b = tracer.call("mul", b, alpha)
    pair = (tracer.lift(a), tracer.lift(b))
    return mapped(tracer, form, pair, promote(*pair))


@operation("div", "divide")
def div(tracer: Tracer, input: Any, other: Any, *, rounding_mode: str | None = None) -> Traced:
    """torch.div, with its rounding modes."""
    if rounding_mode is None:
        return tracer.call("true_divide", input, other)  # type: ignore[no-any-return]
    form = {"floor": forms.floor_divide, "trunc": forms.trunc_divide}[rounding_mode]
    pair = (tracer.lift(input), tracer.lift(other))
    return mapped(tracer, form, pair, promote(*pair))
