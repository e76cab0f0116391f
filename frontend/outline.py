"""What of a function decides whether the trace of another one serves it.

Its code, the kinds of what it captured, and which of these are one object: in variables of its closure, in
defaults, in arguments that `functools.partial` binds, and in attributes of an object that is a mod itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from flexc.frontend.compose import Composition, Traceable
from flexc.frontend.holders import has_attributes
from flexc.frontend.owners import Defaults, Own, attributes_of, is_own, root_of

TENSORS = (torch.Tensor, torch.nn.Parameter)
NUMBERS = (int, float, bool)
VALUES = (type(None), str, bytes, complex, torch.dtype, torch.device)
CONTENT = ""
"""The name of what a variable of a closure holds."""
_DEEPEST = 16
_MOST_OWNERS = 64
_LONGEST = 64
"""A list that is longer is watched as a whole by a trace."""

Place = tuple[int, Any]
"""The number of an owner, and a name, key or index."""


class Unknown(Exception):
    """A trace can't be relocated: its function is of another kind, or what it read is no more."""


class Outline(NamedTuple):
    """The outline of a function."""

    key: tuple[object, ...]
    owners: tuple[Any, ...]
    """What holds what was captured, in order: cells, defaults, tuples, lists, dicts, objects."""
    free: set[Place]
    """Where something may be another object each time, as the key says all of it that matters."""
    codes: list[CodeType]
    """The key names them by identity, as it does `held`, which lives as long as they do."""
    held: list[object]


def outline(function: object) -> Outline | None:
    """The outline of a function, or of masks that are put together; None where there is none."""
    walk = _Walk(root_of(function))
    try:
        walk.callable(function, 0)
    except (Unknown, ValueError):  # a variable of a closure that is not assigned yet
        return None
    return Outline(tuple(walk.key), tuple(walk.owners), walk.free, walk.codes, walk.held)


class _Walk:
    def __init__(self, root: object) -> None:
        self.key: list[object] = []
        self.owners: list[Any] = []
        self.free: set[Place] = set()
        self.codes: list[CodeType] = []
        self.held: list[object] = []
        self._root = root
        self._seen: dict[int, int] = {}

    # What is called.

    def callable(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise Unknown
        if type(value) is FunctionType:
            self._function(value, depth)
        elif isinstance(value, Traceable):
            self.callable(value.function, depth)
        elif isinstance(value, Composition):
            self.key += (type(value), len(value.parts))
            for part in value.parts:
                self.callable(part, depth + 1)
        elif type(value) is functools.partial:
            self.key.append(functools.partial)
            self._container(value.args, depth)
            self._container(value.keywords, depth)
            self.callable(value.func, depth + 1)
        elif type(value) is MethodType:
            self._method(value.__func__, value.__self__, depth)
        else:
            kind = type(value)
            is_module = issubclass(kind, torch.nn.Module)
            self._method(getattr(kind, "forward" if is_module else "__call__", None), value, depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        self.key += (id(code), id(function.__globals__), function.__name__)
        self.held.append(function.__globals__)
        self.codes.append(code)
        if self._is_known(function):
            return
        if "_torchdynamo_orig_callable" in function.__dict__:
            raise Unknown
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":  # what super() needs, which has watches of its own
                raise Unknown
            self._content((self._own(cell), CONTENT), cell.cell_contents, depth)
        values, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        if values or named:
            number = self._own(Defaults(function))
            self.key += (len(values), *named)
            for place, value in (*enumerate(values, -len(values)), *named.items()):
                self._content((number, place), value, depth)

    def _method(self, function: object, owner: Any, depth: int) -> None:
        if type(function) is not FunctionType:
            raise Unknown
        self.key.append(MethodType)
        if isinstance(owner, type):
            self.key.append(weakref.ref(owner))
        elif has_attributes(owner):
            self._object(owner, depth)
        else:
            raise Unknown
        self._function(function, depth)

    # What is captured.

    def _own(self, owner: object) -> int:
        if len(self.owners) == _MOST_OWNERS:
            raise Unknown
        self.owners.append(owner)
        return len(self.owners) - 1

    def _is_known(self, value: object) -> bool:
        """Whether something was met before, which is a part of the key."""
        first = self._seen.setdefault(id(value), len(self._seen))
        self.key.append(first)
        return first != len(self._seen) - 1

    def _content(self, place: Place, value: Any, depth: int, *, of_object: bool = False) -> None:
        kind = type(value)
        if kind in NUMBERS:
            self.key.append(kind)
        elif kind in TENSORS:
            if value.__dict__:  # which a mod may read
                raise Unknown
            self.key += (kind, value.dtype, value.ndim)
            self._is_known(value)
        elif kind in VALUES:
            self.key += (kind, value)
        elif kind is FunctionType or isinstance(
            value, (Traceable, Composition, functools.partial, MethodType)
        ):
            self.free.add(place)
            self.callable(value, depth + 1)
        elif kind in (list, dict) or isinstance(value, tuple):
            self.free.add(place)
            self._container(value, depth)
        else:
            self.key += (weakref.ref(kind),) if of_object else (weakref.ref(kind), id(value))

    def _container(self, value: Any, depth: int) -> None:
        self.key += (weakref.ref(type(value)), len(value))
        if depth > _DEEPEST or len(value) > _LONGEST:
            raise Unknown
        if self._is_known(value):
            return
        number = self._own(value)
        entries: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in entries:
            if type(name) is not int and type(name) is not str:
                raise Unknown
            self.key.append(name)
            self._content((number, name), item, depth + 1)

    def _object(self, value: Any, depth: int) -> None:
        self.key.append(weakref.ref(type(value)))
        if self._is_known(value):
            return
        number = self._own(attributes_of(value, self._root))
        if is_own(value):
            self._own(Own(value))
        for name, item in _attributes(value):
            self.key.append(name)
            self._content((number, name), item, depth, of_object=True)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object has of its own; of a module without its hooks."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        yield from own["_parameters"].items()
        yield from own["_buffers"].items()
        yield from ((name, item) for name, item in own.items() if not name.startswith("_"))
        return
    yield from ((name, item) for name, item in own.items() if not name.startswith("__"))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)
