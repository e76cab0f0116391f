"""Tensors that a mod makes: literals where they have no dimensions, else constants that the trace keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexc.frontend.elementwise import constant, mapped, operation
from flexc.frontend.numbers import TracedNumber
from flexc.frontend.proxy import Traced
from flexc.frontend.real import map_operands, operands

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer


def _default(value: Any) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.get_default_dtype()


def _filled(tracer: Tracer, size: Any, value: Any, dtype: torch.dtype) -> Traced:
    """`value` everywhere; nothing is stored."""
    one = tracer.lift(value)
    if not isinstance(value, (Traced, TracedNumber, torch.Tensor)):
        one = constant(tracer, value, dtype)
    scalar = mapped(tracer, lambda e: e, (one,), dtype)
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not sizes:
        return scalar
    return Traced(tracer, dtype, None, sizes, lambda index: scalar.value)


@operation("tensor", "scalar_tensor")
def tensor(tracer: Tracer, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """torch.tensor of numbers, or of traced values, which are stacked."""
    if isinstance(data, (Traced, torch.Tensor)):
        return tracer.call("clone", data, dtype=dtype)
    if isinstance(data, (int, float)):
        return _filled(tracer, (), data, dtype or _default(data))
    if any(isinstance(o, Traced) for o in operands(data)):
        stacked = tracer.call("stack", [tensor(tracer, item) for item in data])
        return stacked if dtype is None else tracer.call("to", stacked, dtype)
    return _made(tracer, torch.tensor, (data,), {"dtype": dtype, "device": device})


def _made(tracer: Tracer, function: Any, args: Any, kwargs: Any) -> Traced:
    def pin(operand: Any) -> Any:
        if isinstance(operand, TracedNumber):
            return operand.pin()
        raise TypeError("its arguments must be Python numbers")

    with torch._C.DisableTorchFunction():
        made = function(*map_operands(pin, args), **map_operands(pin, kwargs))
    return tracer.own_tensor(made)


def _install() -> None:
    for name in ("arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices", "hann_window"):
        function = getattr(torch, name)
        operation(name)(
            lambda tracer, *args, function=function, **kwargs: _made(tracer, function, args, kwargs)
        )
    for name, value in (("zeros", 0), ("ones", 1)):
        operation(name)(_filler(value))
        operation(f"new_{name}")(_new_filler(value))
        operation(f"{name}_like")(_like_filler(value))


def _size_of(args: tuple[Any, ...], size: Any) -> Any:
    if size is not None:
        return size
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _filler(value: int) -> Any:
    def operation(
        tracer: Tracer, *args: Any, size: Any = None, dtype: Any = None, device: Any = None
    ) -> Traced:
        return _filled(tracer, _size_of(args, size), value, dtype or torch.get_default_dtype())

    return operation


def _new_filler(value: int) -> Any:
    def operation(
        tracer: Tracer, input: Any, *args: Any, size: Any = None, dtype: Any = None, device: Any = None
    ) -> Traced:
        return _filled(tracer, _size_of(args, size), value, dtype or tracer.lift(input).dtype)

    return operation


def _like_filler(value: int) -> Any:
    def operation(tracer: Tracer, input: Any, *, dtype: Any = None, device: Any = None) -> Traced:
        x = tracer.lift(input)
        return _filled(tracer, x.sizes, value, dtype or x.dtype)

    return operation


_install()


@operation("full")
def full(tracer: Tracer, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Traced:
    """torch.full."""
    return _filled(tracer, size, fill_value, dtype or _dtype_of(tracer, fill_value))


@operation("new_full")
def new_full(
    tracer: Tracer, input: Any, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> Traced:
    """Tensor.new_full."""
    return _filled(tracer, size, fill_value, dtype or tracer.lift(input).dtype)


@operation("full_like")
def full_like(
    tracer: Tracer, input: Any, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> Traced:
    """torch.full_like."""
    x = tracer.lift(input)
    return _filled(tracer, x.sizes, fill_value, dtype or x.dtype)


@operation("new_tensor")
def new_tensor(tracer: Tracer, input: Any, data: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Tensor.new_tensor."""
    return tensor(tracer, data, dtype=dtype or tracer.lift(input).dtype)


def _dtype_of(tracer: Tracer, value: Any) -> torch.dtype:
    return tracer.lift(value).dtype if isinstance(value, (Traced, torch.Tensor)) else _default(value)
