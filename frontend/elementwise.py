"""Broadcasting and type promotion: how an operation on expressions becomes one on traced values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flexc.errors import ShapesDoNotBroadcast, UnsupportedOperation
from flexc.frontend.proxy import OPERATIONS, Size, Traced
from flexc.frontend.span import span_here
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.types import DType

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

ZERO = build.const(0)
_WRAPS = {torch.uint8: (0, 255), torch.int8: (128, 255), torch.int16: (32768, 65535)}


Registered = TypeVar("Registered", bound=Callable[..., Any])


def operation(*names: str) -> Callable[[Registered], Registered]:
    """Registers `f(tracer, ...)` under torch's names for it."""

    def register(function: Registered) -> Registered:
        for name in names:
            OPERATIONS[name] = function
        return function

    return register


def node_dtype(dtype: torch.dtype) -> DType:
    """The type that values of a torch dtype are computed in.

    Raises UnsupportedOperation for complex numbers.
    """
    if dtype is torch.bool:
        return DType.BOOL
    if dtype.is_complex:
        raise UnsupportedOperation(f"mods cannot compute in {dtype}", span=span_here())
    if dtype.is_floating_point:
        return DType.F32
    return DType.I64 if dtype is torch.int64 else DType.I32


def promote(*values: Traced) -> torch.dtype:
    """The dtype of arithmetic on `values`, as PyTorch promotes: a Python number changes only the kind."""
    strong = [v.dtype for v in values if not v.weak]
    if not strong:
        return _widest([v.dtype for v in values])
    dtype = _widest(strong)
    for value in values:
        if value.weak and _kind(value.dtype) > _kind(dtype):
            dtype = value.dtype
    return dtype


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _kind(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point else 1


def as_float(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a float function of `dtype`."""
    return dtype if dtype.is_floating_point else torch.float32


def fit(expr: Expr, dtype: torch.dtype) -> Expr:
    """`expr` as a value of `dtype`: converted, and wrapped to 8 or 16 bits like torch's small integers."""
    target = node_dtype(dtype)
    if target is DType.I32 and expr.dtype is DType.I64:
        target = DType.I64  # a literal that needs 64 bits stays exact
    expr = build.cast(expr, target)
    if dtype in _WRAPS and expr.op not in (Op.LOAD, Op.CONST, Op.WHERE, Op.MIN, Op.MAX):
        offset, mask = (build.const(n) for n in _WRAPS[dtype])
        shifted = build.binary(Op.ADD, expr, offset)
        expr = build.binary(Op.SUB, build.binary(Op.BIT_AND, shifted, mask), offset)
    return expr


def broadcast(values: tuple[Traced, ...]) -> tuple[Size, ...]:
    """The sizes of an elementwise result. Raises ShapesDoNotBroadcast."""
    rank = max(len(v.sizes) for v in values)
    result: list[Size] = [1] * rank
    for value in values:
        for i, size in enumerate(value.sizes, rank - len(value.sizes)):
            if size is result[i] or (type(size) is int and size == 1):
                continue
            if result[i] == 1:
                result[i] = size
            elif size != 1 and size != result[i]:
                raise ShapesDoNotBroadcast(
                    f"shapes {_shapes(values)} do not go together",
                    hint="index the longer one, or insert a dimension with `[..., None]`",
                    span=span_here(),
                )
    return tuple(result)


def _shapes(values: tuple[Traced, ...]) -> str:
    return " and ".join(str(tuple(int(size) for size in v.sizes)) for v in values)


def element_of(value: Traced, index: tuple[Expr, ...]) -> Expr:
    """The element of a broadcast operand: it may lack leading dimensions, and those of length 1 repeat."""
    if value.expr is not None:
        return value.expr
    own = index[len(index) - len(value.sizes) :]
    return value.at(tuple(ZERO if size == 1 else i for size, i in zip(value.sizes, own, strict=True)))


def mapped(
    tracer: Tracer, function: Callable[..., Expr], values: tuple[Traced, ...], dtype: torch.dtype
) -> Traced:
    """`function` of the elements of `values`, as a traced value of `dtype`."""
    if all(v.expr is not None for v in values):
        return Traced(tracer, dtype, fit(function(*[v.expr for v in values]), dtype))
    sizes = broadcast(values)
    return Traced(
        tracer,
        dtype,
        None,
        sizes,
        lambda index: fit(function(*[element_of(v, index) for v in values]), dtype),
    )


def constant(tracer: Tracer, value: bool | int | float, dtype: torch.dtype) -> Traced:
    """A literal that is a tensor without dimensions, so that it takes part in promotion."""
    traced = Traced(tracer, dtype, build.const(value, node_dtype(dtype)))
    traced.real = lambda: torch.tensor(value, dtype=dtype)
    return traced
