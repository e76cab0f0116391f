"""What a trace reads from and must not hold: it is kept with the very function or object that was traced."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any

from flexc.frontend.watch import Absent


class Defaults:
    """The defaults of a function's parameters: by name those of keywords, by number from the end others."""

    __slots__ = ("_function", "identity")

    def __init__(self, function: FunctionType) -> None:
        self._function = weakref.ref(function)
        self.identity: object = (Defaults, id(function))

    def __getitem__(self, key: int | str) -> Any:
        function = self._function()
        if function is None:
            raise LookupError(key)
        if isinstance(key, int):
            return (function.__defaults__ or ())[key]
        return (function.__kwdefaults__ or {})[key]


class Attributes:
    """The attributes of an object."""

    __slots__ = ("_object", "identity")

    def __init__(self, owner: object) -> None:
        self._object = weakref.ref(owner)
        self.identity: object = id(owner)

    def __getattr__(self, name: str) -> Any:
        owner = self._object()
        if owner is None:
            raise AttributeError(name)
        return getattr(owner, name)


class Own:
    """What an object has of its own, not by its class: `Absent` where it has no such attribute."""

    __slots__ = ("_object", "identity")

    def __init__(self, owner: object) -> None:
        self._object = weakref.ref(owner)
        self.identity: object = (Own, id(owner))

    def __getitem__(self, name: str) -> Any:
        owner = self._object()
        if owner is None:
            raise LookupError(name)
        return vars(owner).get(name, Absent)


def is_own(owner: Any) -> bool:
    """Whether an object may have attributes that its class does not know, and can be held weakly."""
    return bool(type(owner).__weakrefoffset__) and isinstance(getattr(owner, "__dict__", None), dict)


def identity_of(owner: object) -> object:
    """The same for two that stand for the attributes, or the defaults, of one object."""
    return owner.identity if isinstance(owner, (Defaults, Attributes, Own)) else id(owner)


def attributes_of(owner: Any, root: object) -> Any:
    """`owner`, or what stands for its attributes where it is the `root` that the trace is kept with."""
    if owner is not root or not type(owner).__weakrefoffset__:
        return owner
    return Attributes(owner)


def root_of(function: Any) -> object:
    """The object that keeps the traces of a function: itself, or that of a bound method; no class does."""
    owner = getattr(function, "__self__", function)
    return None if isinstance(owner, type) else owner
