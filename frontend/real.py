"""Operations on captured tensors alone that have no form in a graph: computed for real, at every trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import DataDependentValue, UnsupportedOperation
from flexc.frontend.numbers import TracedNumber
from flexc.frontend.proxy import ATTRIBUTES, Traced
from flexc.frontend.span import span_here

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

_RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("bernoulli", "multinomial", "normal", "poisson", "dropout", "alpha_dropout", "feature_dropout"),
        *("empty", "empty_like", "empty_strided", "new_empty"),
    )
)
_TO_PYTHON = frozenset(
    (
        *("__bool__", "__int__", "__index__", "__float__", "__complex__", "__contains__", "__format__"),
        *("__array__", "item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    )
)


def map_operands(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every traced value and captured number in nested tuples, lists, dicts and slices."""
    if isinstance(value, (Traced, TracedNumber)):
        return function(value)
    if type(value) is tuple or type(value) is list:
        return type(value)(map_operands(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_operands(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_operands(function, end) for end in (value.start, value.stop, value.step)))
    return value


def operands(value: Any) -> list[Traced | TracedNumber]:
    """Every traced value and captured number in nested arguments."""
    found: list[Traced | TracedNumber] = []
    map_operands(found.append, value)
    return found


def realisable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no input of the mod takes part in these arguments."""
    for arg in args:
        if isinstance(arg, Traced):
            if arg.real is None:
                return False
        elif isinstance(arg, (tuple, list, slice)) and not _all_real(arg):
            return False
    return not kwargs or _all_real(kwargs)


def _all_real(value: Any) -> bool:
    return all(o.real is not None for o in operands(value) if isinstance(o, Traced))


def _realise(operand: Traced | TracedNumber) -> Any:
    if isinstance(operand, TracedNumber):
        return operand.pin()
    assert operand.real is not None
    return operand.real()


def _torch_function(name: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    """What to call by name: the method of a tensor, else the function, which also takes a number first."""
    if name in ATTRIBUTES:
        return lambda tensor: getattr(tensor, name)
    method_first = name != "where" and bool(args) and isinstance(args[0], (Traced, torch.Tensor))
    owners: tuple[Any, ...] = (torch, torch.nn.functional, torch.special, torch.linalg)
    for owner in (torch.Tensor, *owners) if method_first else (*owners, torch.Tensor):
        function = getattr(owner, name, None)
        if callable(function):  # torch.float is a dtype
            return function  # type: ignore[no-any-return]
    raise UnsupportedOperation(f"mods cannot use {name}", span=span_here())


def call_real(
    tracer: Tracer,
    function: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keep: bool = False,
) -> Any:
    """Runs a torch function on captured tensors.

    With `keep` the result is returned as it is; else its tensors become captures that are computed again at
    every trace. Raises UnsupportedOperation when an input of the mod takes part, or when the function is
    random, and DataDependentValue when it turns a tensor into a Python value.
    """
    name = function if isinstance(function, str) else function.__name__
    if name in _RANDOM:
        raise UnsupportedOperation(
            f"torch.{name} has no fixed value, and a mod is a pure function",
            hint="make the tensor outside the mod, and index it inside",
            span=span_here(),
        )
    if name in _TO_PYTHON:
        raise DataDependentValue(
            f"{name.strip('_')} turns the contents of a captured tensor into a Python value, "
            "which would be frozen into the kernel",
            hint="use the tensor itself: a tensor without dimensions works in arithmetic, others by index",
            span=span_here(),
        )
    if not realisable(args, kwargs):
        raise UnsupportedOperation(
            f"mods cannot use {name} on traced values",
            hint="use elementwise arithmetic, comparisons, torch.where, and indexing of captured tensors",
            span=span_here(),
        )
    call = _torch_function(function, args) if isinstance(function, str) else function
    with torch._C.DisableTorchFunction():
        result = call(*map_operands(_realise, args), **map_operands(_realise, kwargs))
    return result if keep else _captured(tracer, result)


def _captured(tracer: Tracer, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return tracer.tensor(result)
    if isinstance(result, (tuple, list)):
        items = [_captured(tracer, item) for item in result]
        return type(result)(items)  # named tuples of torch take one sequence, as tuple does
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        tracer.volatile = True  # nothing watches where the number came from
    return result
