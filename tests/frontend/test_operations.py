"""Operators, torch functions and tensor methods give what PyTorch gives, dtype included."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexc.frontend.dispatch import TracingMode
from flexc.frontend.elementwise import node_dtype
from flexc.frontend.proxy import OPERATIONS, Traced
from flexc.frontend.tracer import Tracer
from flexc.ir import build
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.ops import Input

X = torch.tensor([-3.7, -2.5, -1.0, -0.5, -1e-4, 0.0, 1e-3, 0.5, 1.0, 1.5, 2.5, 3.2, 30.0])
Y = torch.tensor([2.0, -2.0, 0.3, 1.5, 3.0, 0.7, -1.1, 0.5, 2.0, -0.4, 4.0, 1.0, 2.2])
I = torch.tensor([-9, -7, -4, -2, -1, 0, 1, 2, 3, 5, 8, 12, 31], dtype=torch.int32)  # noqa: E741
J = torch.tensor([2, -3, 4, -5, 7, 1, 3, -2, 2, 4, -7, 5, 6], dtype=torch.int32)
N = torch.tensor([0, 1, 2, 3, 4, 5, 1, 0, 2, 3, 1, 2, 0], dtype=torch.int32)
P = I > 0
Q = J % 2 == 0

Operation = Callable[..., Any]


def run(function: Operation, *operands: torch.Tensor) -> tuple[Any, torch.dtype | None]:
    """The function traced on loads of the operands, then evaluated; and the dtype that the trace says."""
    tracer = Tracer()
    with TracingMode(tracer):
        arguments = []
        for operand in operands:
            loaded = tracer.tensor(operand)
            index = Traced(tracer, torch.int32, build.input_(Input.Q_IDX))
            arguments.append(loaded[index])
        result = function(*arguments)
    if not isinstance(result, Traced):
        return result, None
    expr = result.value
    assert expr.dtype is node_dtype(result.dtype)
    values = [tracer.leaves[slot.leaf] for slot in tracer.slots if slot.leaf is not None]
    env = Env({Input.Q_IDX: torch.arange(len(operands[0]))}, values, torch, torch.float32)
    return torch.as_tensor(evaluate(expr, env)).expand(operands[0].shape), result.dtype


FLOATS: dict[str, Operation] = {
    name: getattr(torch, name)
    for name in (
        *("exp", "exp2", "expm1", "tanh", "sigmoid", "sin", "cos", "tan", "sinh", "cosh", "erf", "erfc"),
        *("floor", "ceil", "trunc", "fix", "round", "frac", "neg", "negative", "abs", "absolute", "sign"),
        *("sgn", "square", "relu", "reciprocal", "isnan", "isinf", "isfinite", "isneginf", "isposinf"),
        *("signbit", "deg2rad", "rad2deg", "positive", "logical_not", "asinh", "arcsinh", "atan"),
    )
} | {
    "log": lambda x: torch.log(x.abs()),
    "log2": lambda x: torch.log2(x.abs()),
    "log10": lambda x: torch.log10(x.abs()),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log1p near zero": lambda x: torch.log1p(x * 1e-4),
    "expm1 near zero": lambda x: torch.expm1(x * 1e-4),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "logit": lambda x: torch.logit(torch.sigmoid(x).clamp(0.01, 0.99)),
    "expit": lambda x: torch.special.expit(x),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus beta": lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    "mish": F.mish,
    "relu6": F.relu6,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, alpha=1.5),
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": lambda x: F.softshrink(x, 1.5),
    "threshold": lambda x: F.threshold(x, -0.5, 7.0),
    "asinh of large": lambda x: torch.asinh(x * 1e30),
    "asinh near zero": lambda x: torch.asinh(x * 1e-4),
    "asin": lambda x: torch.asin(x / 30),
    "acos": lambda x: torch.acos(x / 30),
    "ends of asin and acos": lambda x: torch.asin(x) + torch.acos(x.clamp(-1, 1)),
    "acosh": lambda x: torch.acosh(x.abs() + 1),
    "acosh of large": lambda x: torch.acosh(x * 1e30),
    "atanh": lambda x: torch.atanh(x / 30),
    "atanh near zero": lambda x: torch.atanh(x * 1e-4),
    "round decimals": lambda x: torch.round(x, decimals=1),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp min": lambda x: torch.clamp(x, min=0.5),
    "clamp max": lambda x: x.clamp_max(0.5),
    "clip": lambda x: torch.clip(x, -2, None),
    "nan_to_num": lambda x: torch.nan_to_num(1 / x, nan=3.0, posinf=4.0, neginf=-5.0),
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: torch.pow(x, 3),
    "pow half": lambda x: x.abs() ** 0.5,
    "pow minus 1": lambda x: x**-1,
    "2 to the x": lambda x: 2**x,
    "3 to the x": lambda x: 3.0**x,
    "rsub": lambda x: 1 - x,
    "rdiv": lambda x: 1 / (x + 0.25),
    "rfloordiv": lambda x: 7 // (x + 0.25),
    "rmod": lambda x: 7 % (x + 0.25),
    "add alpha": lambda x: torch.add(x, x, alpha=3),
    "sub alpha": lambda x: torch.sub(x, 1, alpha=3),
    "long": lambda x: x.long(),
    "int": lambda x: x.int() + 1,
    "to": lambda x: x.to(torch.int16).to(dtype=torch.float32),
    "type": lambda x: x.type(torch.bool),
    "bool": lambda x: x.bool(),
    "double": lambda x: x.double() * 2,
    "half": lambda x: x.half() * 0,
    "masked_fill": lambda x: x.masked_fill(x > 1, -float("inf")),
    "masked_fill tensor": lambda x: x.masked_fill(x > 1, torch.tensor(3.0)),
    "where scalars": lambda x: torch.where(x > 1, 1.0, 0.0),
    "where ints": lambda x: torch.where(x > 1, 1, 0),
    "where method": lambda x: x.where(x > 0, -1.0),
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 10, value=2),
    "full_like": lambda x: torch.full_like(x, 3),
    "zeros_like": lambda x: torch.zeros_like(x) + torch.ones_like(x, dtype=torch.int64),
    "new_full": lambda x: x.new_full((), 2.5),
    "tensor": lambda x: x + torch.tensor(2),
    "no-ops": lambda x: x.contiguous().clone().detach().view(()).reshape(()).squeeze().expand(()),
    "is_floating_point": lambda x: x * x.is_floating_point(),
    "stack": lambda x: torch.stack([x, x * 2, x * 3]).sum(),
    "aten": lambda x: torch.ops.aten.exp(x),
    "aten overload": lambda x: torch.ops.aten.mul.Tensor(x, x),
}
FLOAT_PAIRS: dict[str, Operation] = {
    name: getattr(torch, name)
    for name in (
        *("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "maximum"),
        *("minimum", "fmax", "fmin", "logaddexp", "hypot", "eq", "ne", "lt", "le", "gt", "ge", "max", "min"),
        *("greater", "less_equal", "logical_and", "logical_or", "logical_xor", "copysign", "atan2"),
    )
} | {
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "pow": lambda x, y: torch.pow(x.abs() + 0.1, y),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "clamp tensors": lambda x, y: torch.clamp(x, y, y + 1),
}
INT_PAIRS: dict[str, Operation] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    )
} | {
    "fmod": torch.fmod,
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div floor": lambda x, y: x.div(y, rounding_mode="floor"),
    "maximum": torch.maximum,
    "shift": lambda x, y: (x << 3) >> (y & 3),
    "rshift": lambda x, y: 1 << (y & 7),
    "sub literal": lambda x, y: 7 - x,
    "mixed": lambda x, y: x * 0.5 + y,
    "wide": lambda x, y: x.long() * 10**10 + y,
    "int8 wraps": lambda x, y: x.to(torch.int8) * y.to(torch.int8) * 5,
    "uint8 wraps": lambda x, y: x.to(torch.uint8) - y.to(torch.uint8),
    "int16 wraps": lambda x, y: x.to(torch.int16) * 3000,
    "isin": lambda x, y: torch.isin(x, torch.tensor([1, 5, 8])),
    "sign": lambda x, y: torch.sign(x) * torch.abs(y),
    "bitwise": lambda x, y: torch.bitwise_not(x) + (~y) + torch.bitwise_left_shift(x, 1),
    "square": lambda x, y: x**2 + y**3,
    "floor of ints": lambda x, y: torch.floor(x) + torch.round(y) + x.trunc(),
    "relu": lambda x, y: torch.relu(x),
    "sqrt": lambda x, y: torch.sqrt(x.abs()),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 3),
    "logical": lambda x, y: torch.logical_and(x, y) | torch.logical_not(x),
    "clamp": lambda x, y: x.clamp(-1, 5) + torch.clamp(y, min=torch.tensor(2)),
}
BOOL_PAIRS: dict[str, Operation] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda p, q: ~p,
    "add": operator.add,
    "mul": operator.mul,
    "eq": operator.eq,
    "literal": lambda p, q: (p & True) | (False | q),
    "count": lambda p, q: p.int() + q.long(),
    "times float": lambda p, q: p * 2.5,
    "plus int": lambda p, q: p + 1,
    "where": lambda p, q: torch.where(p, q, ~q),
    "any": lambda p, q: torch.stack([p, q]).any(0),
    "all": lambda p, q: torch.stack([p, q]).all(),
}


def compare(function: Operation, *operands: torch.Tensor) -> None:
    """The trace equals PyTorch, element by element, and has its dtype."""
    actual, dtype = run(function, *operands)
    elements = [function(*element) for element in zip(*operands, strict=True)]
    expected = torch.stack([torch.as_tensor(element) for element in elements])
    if dtype is not None:
        assert dtype is expected.dtype
    if expected.dtype.is_floating_point:
        torch.testing.assert_close(actual, expected.float(), rtol=2e-6, atol=1e-6, equal_nan=True)
    else:
        assert torch.equal(actual.to(expected.dtype), expected)


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_a_float(name: str) -> None:
    compare(FLOATS[name], X)


@pytest.mark.parametrize("name", FLOAT_PAIRS)
def test_functions_of_two_floats(name: str) -> None:
    compare(FLOAT_PAIRS[name], X, Y)


@pytest.mark.parametrize("name", INT_PAIRS)
def test_functions_of_two_integers(name: str) -> None:
    compare(INT_PAIRS[name], I, J)


@pytest.mark.parametrize("name", BOOL_PAIRS)
def test_functions_of_two_booleans(name: str) -> None:
    compare(BOOL_PAIRS[name], P, Q)


def test_integer_powers_are_exact() -> None:
    compare(lambda x, n: x**n, I, N)
    compare(lambda x, n: 2**n, I, N)
    compare(lambda x, n: x.long() ** (n + 3), I, N)


def test_special_values() -> None:
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.0])
    for function in (
        torch.isnan,
        torch.isinf,
        torch.isfinite,
        torch.sigmoid,
        torch.tanh,
        torch.log1p,
        torch.exp,
    ):
        compare(function, special)
    other = torch.tensor([float("inf"), 3.0, 1.0, float("nan"), -float("inf"), -float("inf")])
    compare(torch.fmax, special, other)
    compare(torch.fmin, special, other)
    compare(torch.xlogy, special, other)
    compare(F.hardtanh, special)
    compare(lambda x, y: torch.clamp(x, y, y + 1), special[:2], torch.tensor([1.0, 2.0]))
    compare(torch.logaddexp, special, other)


def test_reflected_and_in_place_operators() -> None:
    compare(lambda x, y: 3 - x + 2 * y, I, J)
    compare(lambda x, y: (5 & x) | (2 ^ y), I, J)
    compare(lambda x, y: 100 // y + 100 % y, I, J)

    def in_place(x: Any, y: Any) -> Any:
        x = x + 0
        x += y
        x *= 2
        x -= 1
        x //= 3
        x &= 255
        return x.clamp_(1, 200).add_(1)

    compare(in_place, I, J)


def test_every_operation_is_documented_or_derived() -> None:
    assert len(OPERATIONS) > 150
    assert all(callable(function) for function in OPERATIONS.values())


# Shapes, indices and reductions, on whole tensors.

A = torch.randn(3, 4, 5)
B = torch.randint(-4, 4, (4, 5))

WHOLE: dict[str, Operation] = {
    "ellipsis": lambda a, b: a[..., 1],
    "partial": lambda a, b: a[1],
    "none": lambda a, b: a[:, None, 2],
    "slices": lambda a, b: a[1:, :-1, 1:3],
    "steps": lambda a, b: a[::2, 1::2],
    "negative": lambda a, b: a[-1, -2],
    "vector index": lambda a, b: a[:, torch.tensor([2, 0, 3])],
    "two vector indices": lambda a, b: a[torch.tensor([2, 0]), :, torch.tensor([1, 4])],
    "adjacent vector indices": lambda a, b: a[:, torch.tensor([2, 0]), torch.tensor([1, 4])],
    "list index": lambda a, b: a[[0, 2]],
    "index by a table": lambda a, b: A[0][b.clamp(0, 3)[:, 0]],
    "unbind": lambda a, b: a.unbind(1)[2],
    "iteration": lambda a, b: sum(row * 2 for row in a),
    "select": lambda a, b: a.select(1, 3),
    "index_select": lambda a, b: torch.index_select(a, 1, torch.tensor([0, 3])),
    "take": lambda a, b: torch.take(a, torch.tensor([0, 17, 42])),
    "unsqueeze": lambda a, b: a.unsqueeze(1).unsqueeze(-1).squeeze(1),
    "squeeze": lambda a, b: a[None, :, None].squeeze(),
    "view": lambda a, b: a.view(12, 5) + a.reshape(-1, 5),
    "flatten": lambda a, b: a.flatten(1) + a.reshape(3, 20),
    "permute": lambda a, b: a.permute(2, 0, 1),
    "transpose": lambda a, b: a.transpose(0, 2) + a.transpose(0, 1).transpose(1, 2).transpose(0, 1),
    "T": lambda a, b: b.T + b.t() + b.mT,
    "expand": lambda a, b: b[0].expand(3, -1) + b[:1].expand_as(b)[:3],
    "broadcast": lambda a, b: a + b,
    "stack": lambda a, b: torch.stack([b, b * 2], -1),
    "sum": lambda a, b: a.sum(-1) + b.sum(1),
    "sum all": lambda a, b: a.sum(),
    "sum dims": lambda a, b: a.sum((0, 2), keepdim=True),
    "sum of bools": lambda a, b: (b > 0).sum(0),
    "mean": lambda a, b: a.mean(1),
    "prod": lambda a, b: b.prod(1),
    "any": lambda a, b: (a > 1.5).any(dim=-1),
    "all": lambda a, b: (a > -1.5).all(-1),
    "amax": lambda a, b: a.amax(-1) - a.amin(-1),
    "max": lambda a, b: a.max(-1).values + a.min(dim=-1)[0],
    "argmax": lambda a, b: a.argmax(-1) * 10 + a.argmin(-1),
    "max all": lambda a, b: torch.max(a) + b.max(),
    "dot": lambda a, b: torch.dot(a[0, 0], a[1, 1]) + a[0, 1] @ a[0, 2],
    "vecdot": lambda a, b: torch.linalg.vecdot(a[0, 0], a[1, 1]),
    "norm": lambda a, b: a[0].norm(dim=-1),
    "logsumexp": lambda a, b: torch.logsumexp(a, -1),
    "count_nonzero": lambda a, b: torch.count_nonzero(b, dim=1),
    "searchsorted": lambda a, b: torch.searchsorted(torch.tensor([-3, 0, 2]), b, right=True),
    "bucketize": lambda a, b: torch.bucketize(b, torch.tensor([-3, 0, 2])),
    "zeros": lambda a, b: a + torch.zeros(5) + torch.ones(4, 1) + torch.full((3, 1, 1), 2.0),
    "arange": lambda a, b: b + torch.arange(5) + torch.linspace(0, 1, 5),
    "nested": lambda a, b: a[b.clamp(0, 2)][1, 2],
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors(name: str) -> None:
    function = WHOLE[name]
    expected = function(A, B)
    tracer = Tracer()
    with TracingMode(tracer):
        traced = tracer.lift(function(tracer.tensor(A), tracer.tensor(B)))
    assert [int(size) for size in traced.sizes] == list(expected.shape)
    assert traced.dtype is expected.dtype
    assert traced.real is not None
    assert torch.equal(traced.real(), expected)
    at = [
        torch.arange(n).reshape([-1 if i == d else 1 for i in range(expected.ndim)])
        for d, n in enumerate(expected.shape)
    ]
    inputs = (Input.B, Input.H, Input.Q_IDX, Input.KV_IDX)
    index = tuple(build.input_(which) for which in inputs[: len(at)])
    expr = traced.at(index)
    done = tracer.program.run(tracer.leaves)
    values = [tracer.leaves[s.leaf] if s.leaf is not None else done[s.step or 0] for s in tracer.slots]
    env = Env(dict(zip(inputs, at, strict=False)), values, torch, torch.float32)
    actual = torch.as_tensor(evaluate(expr, env)).expand(expected.shape)
    if expected.dtype.is_floating_point:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(actual.to(expected.dtype), expected)
