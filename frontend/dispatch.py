"""Routes every torch function that a mod calls to the tracer."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodDescriptorType
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from flexc.errors import MutationInMod, UnsupportedOperation
from flexc.frontend.proxy import OPERATIONS, OPERATORS
from flexc.frontend.real import call_real, operands
from flexc.frontend.span import span_here

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

_REFLECTED = {f"__r{name}__": operation for name, operation in OPERATORS.items()} | {
    "__rdiv__": "true_divide"
}
_PLAIN = {f"__{name}__": operation for name, operation in OPERATORS.items()} | {
    "__div__": "true_divide",
    "__neg__": "neg",
    "__pos__": "positive",
    "__invert__": "bitwise_not",
    "__abs__": "abs",
    **{f"__{name}__": name for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}
_PREFIXES = ("special_", "linalg_")


class TracingMode(TorchFunctionMode):
    """While it is on, torch functions on captured tensors reach the tracer too."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Everything goes through `dispatch`."""
        return dispatch(self.tracer, func, args, kwargs or {})


def dispatch_from_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dispatch` where no mode is on: the tracer is that of the first traced operand."""
    return dispatch(operands((args, kwargs))[0].tracer, func, args, kwargs)


def dispatch(tracer: Tracer, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The traced result of a torch function."""
    name = _name(func)
    if name == "__get__":
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        if attribute in OPERATIONS:
            return tracer.call(attribute, *args[:1])
        return call_real(tracer, func, args, kwargs)
    if name == "__set__" or _mutates(name) or kwargs.get("out") is not None:
        raise MutationInMod(
            f"{name} changes a tensor, and a mod is a pure function",
            hint="compute a new value: `x = x + y`, torch.where(condition, new, old)",
            span=span_here(),
        )
    if name in _REFLECTED and len(args) == 2:
        return tracer.call(_REFLECTED[name], args[1], args[0])
    if name == "where" and isinstance(func, MethodDescriptorType):
        return tracer.call(name, args[1], args[0], *args[2:], **kwargs)  # the method has another order
    name = _PLAIN.get(name, name)
    if name in OPERATIONS:
        return tracer.call(name, *_positional(args, kwargs), **kwargs)
    return call_real(tracer, func, args, kwargs)


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`input=` by keyword is the first argument; keywords that choose no value are dropped."""
    for ignored in ("out", "memory_format", "layout", "pin_memory", "requires_grad", "non_blocking", "copy"):
        kwargs.pop(ignored, None)
    return (kwargs.pop("input"), *args) if "input" in kwargs else args


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", None)
    if name is None:
        raise UnsupportedOperation(f"mods cannot use {func!r}", span=span_here())
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return str(name).partition(".")[0]  # an OpOverload is called "exp.default"


def _mutates(name: str) -> bool:
    if name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and f"__{name[3:]}" in _PLAIN
    return name.endswith("_")
