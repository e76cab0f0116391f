"""Operations with optional arguments: where, clamp, conversions, activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import UnsupportedOperation
from flexc.frontend import math_forms as forms
from flexc.frontend.elementwise import as_float, fit, mapped, operation, promote
from flexc.frontend.proxy import Traced
from flexc.frontend.span import span_here
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer


@operation("where")
def where(tracer: Tracer, condition: Any, input: Any = None, other: Any = None) -> Traced:
    """torch.where of three operands."""
    if input is None or other is None:
        raise UnsupportedOperation(
            "torch.where with one operand gives positions, which mods cannot hold",
            hint="write torch.where(condition, a, b)",
            span=span_here(),
        )
    chosen = (tracer.lift(condition), tracer.lift(input), tracer.lift(other))
    if chosen[0].dtype is not torch.bool and chosen[0].dtype is not torch.uint8:
        raise UnsupportedOperation(
            f"torch.where needs a boolean condition, not {chosen[0].dtype}",
            hint="write torch.where(x != 0, a, b)",
            span=span_here(),
        )
    return mapped(tracer, build.where, chosen, promote(*chosen[1:]))


@operation("masked_fill")
def masked_fill(tracer: Tracer, input: Any, mask: Any, value: Any) -> Traced:
    """`value` where `mask` holds; of the type of `input`."""
    operands = (tracer.lift(mask), tracer.lift(value), tracer.lift(input))
    return mapped(tracer, build.where, operands, operands[2].dtype)


@operation("clamp", "clip")
def clamp(tracer: Tracer, input: Any, min: Any = None, max: Any = None) -> Traced:
    """torch.clamp with numbers or tensors as bounds; the upper one wins."""
    result = tracer.lift(input)
    bounds = ((min, forms.raised), (max, forms.lowered))
    for bound, form in bounds:
        if bound is not None:
            pair = (result, tracer.lift(bound))
            result = mapped(tracer, form, pair, promote(*pair))
    return result


@operation("clamp_min")
def clamp_min(tracer: Tracer, input: Any, min: Any) -> Traced:
    """The larger of the two."""
    return clamp(tracer, input, min=min)


@operation("clamp_max")
def clamp_max(tracer: Tracer, input: Any, max: Any) -> Traced:
    """The smaller of the two."""
    return clamp(tracer, input, max=max)


@operation("hardtanh")
def hardtanh(
    tracer: Tracer, input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> Traced:
    """torch.nn.functional.hardtanh."""
    operands = (tracer.lift(input), tracer.lift(min_val), tracer.lift(max_val))
    return mapped(tracer, forms.hardtanh, operands, operands[0].dtype)


@operation("round")
def round_(tracer: Tracer, input: Any, *, decimals: int = 0) -> Traced:
    """To the nearest integer or decimal, ties to even."""
    x = tracer.lift(input)
    scale = forms.f32(10.0 ** int(decimals))
    if int(decimals) == 0:
        return mapped(tracer, forms.round_half_even, (x,), x.dtype)
    return mapped(
        tracer, lambda e: forms.div(forms.round_half_even(forms.mul(e, scale)), scale), (x,), x.dtype
    )


@operation("to", "type", "type_as", "astype")
def to(
    tracer: Tracer, input: Any, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Traced:
    """A conversion; devices are not ours to change."""
    x = tracer.lift(input)
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (Traced, torch.Tensor)):
            dtype = tracer.lift(arg).dtype
        elif arg is float or arg is int or arg is bool:
            dtype = {float: torch.float64, int: torch.int64, bool: torch.bool}[arg]
    if dtype is None or dtype == x.dtype:
        return x
    return mapped(tracer, lambda e: fit(e, dtype), (x,), dtype)


def _install_casts() -> None:
    casts = {
        "float": torch.float32,
        "double": torch.float64,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "int": torch.int32,
        "long": torch.int64,
        "short": torch.int16,
        "char": torch.int8,
        "byte": torch.uint8,
        "bool": torch.bool,
    }
    for name, dtype in casts.items():
        operation(name)(lambda tracer, input, *, dtype=dtype, **kwargs: to(tracer, input, dtype))
    for name in ("contiguous", "cpu", "cuda", "alias", "requires_grad_"):
        operation(name)(lambda tracer, input, *args, **kwargs: tracer.lift(input))


_install_casts()


@operation("detach", "data", "detach_copy")
def detach(tracer: Tracer, input: Any) -> Traced:
    """The values, through which no gradient goes."""
    x = tracer.lift(input)
    result = mapped(tracer, build.detach, (x,), x.dtype)
    result.name, result.weak = x.name, x.weak
    return result


@operation("clone", "as_tensor", "asarray")
def clone(tracer: Tracer, input: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """A copy, which in-place operations on the original do not reach."""
    if isinstance(input, (list, tuple)):
        return tracer.call("tensor", input, dtype=dtype)
    x = tracer.lift(input)
    return mapped(tracer, lambda e: e, (x,), dtype or x.dtype)


@operation("gelu")
def gelu(tracer: Tracer, input: Any, *, approximate: str = "none") -> Traced:
    """torch.nn.functional.gelu, both forms."""
    x = tracer.lift(input)
    form = forms.gelu_tanh if approximate == "tanh" else forms.gelu_erf
    return mapped(tracer, form, (x,), as_float(x.dtype))


@operation("softplus")
def softplus(tracer: Tracer, input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Traced:
    """torch.nn.functional.softplus."""
    operands = (tracer.lift(input), tracer.lift(beta), tracer.lift(threshold))

    def form(x: Expr, beta: Expr, threshold: Expr) -> Expr:
        scaled = forms.mul(x, beta)
        return build.where(forms.less(threshold, scaled), x, forms.div(forms.softplus(scaled), beta))

    return mapped(tracer, form, operands, as_float(operands[0].dtype))


@operation("leaky_relu")
def leaky_relu(tracer: Tracer, input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Traced:
    """torch.nn.functional.leaky_relu."""
    operands = (tracer.lift(input), tracer.lift(negative_slope))
    return mapped(
        tracer,
        lambda x, slope: build.where(forms.less(forms.f32(0), x), x, forms.mul(x, slope)),
        operands,
        as_float(operands[0].dtype),
    )


@operation("elu")
def elu(tracer: Tracer, input: Any, alpha: Any = 1.0, inplace: bool = False) -> Traced:
    """torch.nn.functional.elu."""
    operands = (tracer.lift(input), tracer.lift(alpha))
    return mapped(
        tracer,
        lambda x, alpha: build.where(forms.less(forms.f32(0), x), x, forms.mul(alpha, forms.expm1(x))),
        operands,
        as_float(operands[0].dtype),
    )


@operation("celu")
def celu(tracer: Tracer, input: Any, alpha: Any = 1.0, inplace: bool = False) -> Traced:
    """torch.nn.functional.celu."""
    operands = (tracer.lift(input), tracer.lift(alpha))

    def form(x: Expr, alpha: Expr) -> Expr:
        below = forms.mul(alpha, forms.expm1(forms.div(x, alpha)))
        return build.where(forms.less(forms.f32(0), x), x, below)

    return mapped(tracer, form, operands, as_float(operands[0].dtype))


@operation("hardshrink")
def hardshrink(tracer: Tracer, input: Any, lambd: Any = 0.5) -> Traced:
    """torch.nn.functional.hardshrink."""
    operands = (tracer.lift(input), tracer.lift(lambd))
    return mapped(tracer, forms.hardshrink, operands, as_float(operands[0].dtype))


@operation("softshrink")
def softshrink(tracer: Tracer, input: Any, lambd: Any = 0.5) -> Traced:
    """torch.nn.functional.softshrink."""
    operands = (tracer.lift(input), tracer.lift(lambd))
    return mapped(tracer, forms.softshrink, operands, as_float(operands[0].dtype))


@operation("threshold", "_threshold")
def threshold(tracer: Tracer, input: Any, threshold: Any, value: Any, inplace: bool = False) -> Traced:
    """torch.nn.functional.threshold."""
    operands = (tracer.lift(input), tracer.lift(threshold), tracer.lift(value))
    return mapped(
        tracer,
        lambda x, bound, value: build.where(build.compare(Op.LE, x, bound), value, x),
        operands,
        operands[0].dtype,
    )


@operation("lerp")
def lerp(tracer: Tracer, input: Any, end: Any, weight: Any) -> Traced:
    """Input + weight * (end - input)."""
    return tracer.call("add", input, tracer.call("mul", weight, tracer.call("sub", end, input)))  # type: ignore[no-any-return]


@operation("addcmul")
def addcmul(tracer: Tracer, input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Traced:
    """Input + value * tensor1 * tensor2."""
    return tracer.call("add", input, tracer.call("mul", tensor1, tensor2), alpha=value)  # type: ignore[no-any-return]


@operation("addcdiv")
def addcdiv(tracer: Tracer, input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Traced:
    """Input + value * tensor1 / tensor2."""
    return tracer.call("add", input, tracer.call("true_divide", tensor1, tensor2), alpha=value)  # type: ignore[no-any-return]


@operation("nan_to_num")
def nan_to_num(tracer: Tracer, input: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Traced:
    """Finite numbers in place of NaN and the infinities."""
    x = tracer.lift(input)
    largest = torch.finfo(x.dtype).max if x.dtype.is_floating_point else math.inf
    replacements = (nan, largest if posinf is None else posinf, -largest if neginf is None else neginf)
    operands = (x, *(tracer.lift(r) for r in replacements))

    def form(x: Expr, nan: Expr, high: Expr, low: Expr) -> Expr:
        x = build.where(forms.is_nan(x), nan, x)
        return build.where(
            forms.equal(x, forms.INF), high, build.where(forms.equal(x, forms.neg(forms.INF)), low, x)
        )

    return mapped(tracer, form, operands, x.dtype) if x.dtype.is_floating_point else x


@operation("is_floating_point")
def is_floating_point(tracer: Tracer, input: Any) -> bool:
    """Whether the dtype is a float."""
    return tracer.lift(input).dtype.is_floating_point


@operation("is_complex")
def is_complex(tracer: Tracer, input: Any) -> bool:
    """Never."""
    return False
