"""Compositions of masks, and the base of everything that stands for a function to trace."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from flexc.frontend.copies import Memo, copied

Function = Callable[..., Any]


class Traceable:
    """Something that stands for a function: a decorated mod."""

    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


class Composition(ABC):
    """A mask made of other masks, `parts`."""

    parts: tuple[Function, ...]

    @abstractmethod
    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether the pair is allowed."""

    def _each(self, *indices: Any) -> list[Any]:
        """What each part says of a pair."""
        return [undecorated(part)(*indices) for part in self.parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.parts

    def __deepcopy__(self, memo: Memo) -> Composition:
        return type(self)(*(copied(part, memo) for part in self.parts))


class Both(Composition):
    """`a & b & ...`."""

    def __init__(self, *parts: Function) -> None:
        self.parts = _flat(Both, parts)
        self.__name__ = " & ".join(map(name_of, self.parts))

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether all allow the pair."""
        return functools.reduce(operator.and_, self._each(b, h, q_idx, kv_idx))


class Either(Composition):
    """`a | b | ...`."""

    def __init__(self, *parts: Function) -> None:
        self.parts = _flat(Either, parts)
        self.__name__ = " | ".join(map(name_of, self.parts))

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether one allows the pair."""
        return functools.reduce(operator.or_, self._each(b, h, q_idx, kv_idx))


def _flat(kind: type[Composition], parts: tuple[Function, ...]) -> tuple[Function, ...]:
    """A first part of the same kind gives its own parts, so that a long chain is not a deep one."""
    first = parts[0].function if isinstance(parts[0], Traceable) else parts[0]
    return (*first.parts, *parts[1:]) if type(first) is kind and isinstance(first, Composition) else parts


class Negation(Composition):
    """`~mask`."""

    def __init__(self, mask: Function) -> None:
        self.parts = (mask,)
        self.__name__ = f"~{name_of(mask)}"

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether the mask refuses the pair."""
        allowed = undecorated(self.parts[0])(b, h, q_idx, kv_idx)
        return not allowed if isinstance(allowed, bool) else ~allowed


def undecorated(function: Function) -> Function:
    """The user's own function.

    torch.compile of PyTorch 2.11 asks what is called for its truth value, which a mask refuses to have.
    """
    return function.function if isinstance(function, Traceable) else function


def name_of(function: Function) -> str:
    """How a function is called in messages; compositions in brackets."""
    if torch.compiler.is_dynamo_compiling():
        return "mask"  # of a mask made inside a compiled function, which PyTorch 2.11 can't ask for its name
    name = getattr(function, "__name__", None) or type(function).__name__
    inner = function.function if isinstance(function, Traceable) else function
    return f"({name})" if isinstance(inner, (Both, Either)) else str(name)
