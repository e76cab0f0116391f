"""Read-only stand-ins for captured lists, dicts, objects, classes and modules."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from flexc.errors import MutationInMod
from flexc.frontend.span import span_here

if TYPE_CHECKING:
    from flexc.frontend.captures import Captures

_MISSING = object()
_LIST_CHANGES = (
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
    *("__setitem__", "__delitem__", "__iadd__", "__imul__"),
)
_DICT_CHANGES = ("__setitem__", "__delitem__", "pop", "popitem", "clear", "update", "setdefault", "__ior__")


def _refuse(what: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise MutationInMod(
            f"a mod changes {what} that it captured, and a mod is a pure function",
            hint="compute new values, or change it outside the mod",
            span=span_here(),
        )

    return method


class CapturedList(list[Any]):
    """A captured list; changing it is an error."""


class CapturedDict(dict[Any, Any]):
    """A captured dict; changing it is an error."""


def _install() -> None:
    for name in _LIST_CHANGES:
        setattr(CapturedList, name, _refuse("a list"))
    for name in _DICT_CHANGES:
        setattr(CapturedDict, name, _refuse("a dict"))


_install()


class CapturedObject:
    """A captured object, class or module: its attributes are captures, its methods run on this stand-in."""

    __slots__ = ("_attributes", "_captures", "_name", "_object")

    def __init__(self, captures: Captures, value: Any, name: str) -> None:
        object.__setattr__(self, "_captures", captures)
        object.__setattr__(self, "_object", value)
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_attributes", {})

    def __getattribute__(self, name: str) -> Any:
        value = _own(self, "_object")
        if name == "__class__":
            return (
                _own(self, "_captures").wrap(type(value), f"type({name})")[0] if _is_read() else type(value)
            )
        attributes = _own(self, "_attributes")
        found = attributes.get(name, _MISSING)
        if found is _MISSING:
            found = _attribute(self, value, name)
            if not isinstance(_static(value, name), property):
                attributes[name] = found
        return found

    __setattr__ = _refuse("an object")
    __delattr__ = _refuse("an object")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = _own(self, "_object")
        if isinstance(value, type):
            _own(self, "_captures").guard_class(value)
            return value(*args, **kwargs)
        if isinstance(value, _module_class()):
            return self.forward(*args, **kwargs)
        return _special(self, "__call__", *args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _own(self, "_object"))

    def __eq__(self, other: object) -> Any:
        return _as_a_whole(self) == _original(other)

    def __hash__(self) -> int:
        return hash(_as_a_whole(self))

    def __bool__(self) -> bool:
        value = _own(self, "_object")
        if hasattr(type(value), "__bool__"):
            return bool(_special(self, "__bool__"))
        return bool(len(self)) if hasattr(type(value), "__len__") else True

    def __len__(self) -> int:
        return int(_special(self, "__len__"))

    def __getitem__(self, index: Any) -> Any:
        return _special(self, "__getitem__", index)

    def __iter__(self) -> Iterator[Any]:
        return iter(_special(self, "__iter__"))

    def __contains__(self, item: Any) -> bool:
        return bool(_special(self, "__contains__", item))

    def __repr__(self) -> str:
        return f"captured {_own(self, '_name')}"


def _is_read() -> bool:
    """Whether the user wrote `x.__class__`, rather than isinstance asking for it."""
    frame = sys._getframe(2)
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("LOAD_")


@functools.cache
def _module_class() -> type[Any]:
    import torch

    return torch.nn.Module


def _own(holder: CapturedObject, name: str) -> Any:
    return object.__getattribute__(holder, name)


def _as_a_whole(holder: CapturedObject) -> Any:
    """The original, of which no one can say what is read."""
    value = _own(holder, "_object")
    _own(holder, "_captures").watch.compared.add(id(value))
    return value


def _original(value: Any) -> Any:
    return _as_a_whole(value) if type(value) is CapturedObject else value


def _static(value: Any, name: str) -> Any:
    owner = value if isinstance(value, type) else type(value)
    return inspect.getattr_static(owner, name, None)


def _special(holder: CapturedObject, name: str, *args: Any, **kwargs: Any) -> Any:
    """A special method: run on the stand-in if it is written in Python, else on the original."""
    value, captures = _own(holder, "_object"), _own(holder, "_captures")
    method = getattr(type(value), name, None)
    if isinstance(method, FunctionType):
        return captures.wrap(method, name)[0](holder, *args, **kwargs)
    if method is None:
        raise TypeError(f"{type(value).__name__!r} object does not support {name}")
    _as_a_whole(holder)
    return captures.wrap(method(value, *args, **kwargs), f"{_own(holder, '_name')}.{name}")[0]


def _attribute(holder: CapturedObject, value: Any, name: str) -> Any:
    captures = _own(holder, "_captures")
    full = f"{_own(holder, '_name')}.{name}"
    if name in getattr(value, "__dict__", ()):
        return captures.attribute(value, name, full)
    static = _static(value, name)
    if isinstance(value, type):
        return captures.attribute(value, name, full)
    if isinstance(static, FunctionType):
        return MethodType(captures.method(value, name, full), holder)
    if isinstance(static, property) and static.fget is not None:
        return captures.wrap(static.fget, full)[0](holder)
    if isinstance(static, functools.cached_property):
        return captures.wrap(static.func, full)[0](holder)
    return captures.attribute(value, name, full)


def has_attributes(value: Any) -> bool:
    """Whether something that a mod reads may hide in attributes of `value`."""
    if isinstance(value, _module_class()):
        return True
    if isinstance(value, (Enum, BaseException)):
        return False
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("torch", "numpy", "builtins"):
        return False
    return hasattr(value, "__dict__") or hasattr(kind, "__slots__")
