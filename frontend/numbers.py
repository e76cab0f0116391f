"""Stand-ins for captured Python numbers: they compute as Python does, and remember how.

`__class__` says int, float or bool, so `isinstance` in a mod answers as it would for the number itself. They
derive from torch's symbolic numbers only because torch's argument parser takes those where it wants a plain
number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexc.frontend.host import Number

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer


class TracedNumber:
    """A number known now that may be another at the next call; `step` is its place in the tracer's program.

    Anything that only a real number can do (`if`, `range`, `int`, hashing, formatting) pins it: the value
    becomes a constant of the graph, guarded, and another value is traced again.
    """

    tracer: Tracer
    step: int
    value: Any

    def __init__(self, tracer: Tracer, step: int, value: Number) -> None:
        self.tracer = tracer
        self.step = step
        self.value = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from flexc.frontend.dispatch import dispatch_from_operands

        return dispatch_from_operands(func, args, kwargs or {})

    def pin(self) -> Any:
        """The plain number, from now on a guarded constant."""
        self.tracer.guard(self.step, self.value)
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("tracer", "step", "value", "node"):
            raise AttributeError(name)
        return getattr(self.pin(), name)


def traced_number(tracer: Tracer, step: int, value: Number) -> TracedNumber:
    """The stand-in of the fitting type."""
    if type(value) is bool:
        return TracedBool(tracer, step, value)
    return TracedInt(tracer, step, value) if type(value) is int else TracedFloat(tracer, step, value)


def apply(function: Callable[..., Any], symbol: str, *operands: object) -> Any:
    """`function` of numbers and stand-ins, as another stand-in. NotImplemented for any other operand."""
    tracer = None
    for operand in operands:
        if isinstance(operand, TracedNumber):
            tracer = operand.tracer
        elif type(operand) not in (int, float, bool):
            return NotImplemented
    assert tracer is not None
    values = [o.value if isinstance(o, TracedNumber) else o for o in operands]
    result = function(*values)
    if type(result) not in (int, float, bool):
        for operand in operands:
            if isinstance(operand, TracedNumber):
                operand.pin()
        return result
    return tracer.apply(function, symbol, operands, result)


def _binary(function: Callable[..., Any], symbol: str) -> Callable[[Any, object], Any]:
    return lambda self, other: apply(function, symbol, self, other)


def _reflected(function: Callable[..., Any], symbol: str) -> Callable[[Any, object], Any]:
    return lambda self, other: apply(function, symbol, other, self)


def _unary(function: Callable[..., Any], symbol: str) -> Callable[[Any], Any]:
    return lambda self: apply(function, symbol, self)


def _pinned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self.pin(), *args)


_BINARY: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (operator.add, "+"),
    "sub": (operator.sub, "-"),
    "mul": (operator.mul, "*"),
    "truediv": (operator.truediv, "/"),
    "floordiv": (operator.floordiv, "//"),
    "mod": (operator.mod, "%"),
    "divmod": (divmod, "divmod"),
    "pow": (operator.pow, "**"),
    "lshift": (operator.lshift, "<<"),
    "rshift": (operator.rshift, ">>"),
    "and": (operator.and_, "&"),
    "or": (operator.or_, "|"),
    "xor": (operator.xor, "^"),
}
_COMPARE: dict[str, tuple[Callable[..., Any], str]] = {
    "lt": (operator.lt, "<"),
    "le": (operator.le, "<="),
    "gt": (operator.gt, ">"),
    "ge": (operator.ge, ">="),
    "eq": (operator.eq, "=="),
    "ne": (operator.ne, "!="),
}
_UNARY: dict[str, tuple[Callable[..., Any], str]] = {
    "neg": (operator.neg, "-"),
    "pos": (operator.pos, "+"),
    "invert": (operator.invert, "~"),
    "abs": (abs, "abs"),
    "floor": (math.floor, "floor"),
    "ceil": (math.ceil, "ceil"),
    "trunc": (math.trunc, "trunc"),
}
_PINNING: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__int__": int,
    "__index__": operator.index,
    "__float__": float,
    "__complex__": complex,
    "__hash__": hash,
    "__round__": round,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "as_integer_ratio": lambda x: x.as_integer_ratio(),
    "conjugate": lambda x: x.conjugate(),
    "is_integer": lambda x: x.is_integer(),
    "hex": lambda x: x.hex(),
    "__reduce_ex__": lambda x, protocol: x.__reduce_ex__(protocol),
    "__deepcopy__": lambda x, memo: x,
}


def _install() -> None:
    for name, (function, symbol) in _BINARY.items():
        setattr(TracedNumber, f"__{name}__", _binary(function, symbol))
        setattr(TracedNumber, f"__r{name}__", _reflected(function, symbol))
    for name, (function, symbol) in _COMPARE.items():
        setattr(TracedNumber, f"__{name}__", _binary(function, symbol))
    for name, (function, symbol) in _UNARY.items():
        setattr(TracedNumber, f"__{name}__", _unary(function, symbol))
    for name, function in _PINNING.items():
        setattr(TracedNumber, name, _pinned(function))


_install()


class TracedInt(TracedNumber, torch.SymInt):
    """A captured int."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return int


class TracedFloat(TracedNumber, torch.SymFloat):
    """A captured float."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return float


class TracedBool(TracedNumber, torch.SymBool):
    """A captured bool, or a comparison of captured numbers: `if W > 0` guards the answer, not W."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return bool


def plain(value: object) -> object:
    """`value`, pinned if it stands for a captured number."""
    return value.pin() if isinstance(value, TracedNumber) else value
