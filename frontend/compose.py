"""Compositions of masks, and the base of everything that stands for a function to trace."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Traceable:
    """Something that stands for a function: a decorated mod."""

    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


class Composition:
    """A mask made of other masks, `parts`."""

    parts: tuple[Function, ...]

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether the pair is allowed."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.parts


class Both(Composition):
    """`a & b & ...`."""

    def __init__(self, *parts: Function) -> None:
        self.parts = _flat(Both, parts)
        self.__name__ = " & ".join(map(name_of, self.parts))

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether all allow the pair."""
        return functools.reduce(operator.and_, (part(b, h, q_idx, kv_idx) for part in self.parts))


class Either(Composition):
    """`a | b | ...`."""

    def __init__(self, *parts: Function) -> None:
        self.parts = _flat(Either, parts)
        self.__name__ = " | ".join(map(name_of, self.parts))

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether one allows the pair."""
        return functools.reduce(operator.or_, (part(b, h, q_idx, kv_idx) for part in self.parts))


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
        allowed = self.parts[0](b, h, q_idx, kv_idx)
        return not allowed if isinstance(allowed, bool) else ~allowed


def name_of(function: Function) -> str:
    """How a function is called in messages; compositions in brackets."""
    name = getattr(function, "__name__", None) or type(function).__name__
    inner = function.function if isinstance(function, Traceable) else function
    return f"({name})" if isinstance(inner, (Both, Either)) else str(name)
