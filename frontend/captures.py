"""Copies of what a mod captured in which Python numbers are stand-ins, and a watch on every place read."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable
from numbers import Number
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from flexc.errors import MutationInMod
from flexc.frontend.code import facts_of
from flexc.frontend.compose import Composition, Traceable
from flexc.frontend.holders import CapturedDict, CapturedList, CapturedObject, has_attributes
from flexc.frontend.owners import Defaults, Own, attributes_of, is_own
from flexc.frontend.span import span_of_instruction
from flexc.frontend.tracer import Tracer
from flexc.frontend.watch import NO_LEAF, Absent, AttributePlace, CellPlace, ItemPlace, Watch

_TRUSTED = sys.stdlib_module_names | {"torch", "numpy", "triton", "functorch", "builtins"}
_LONGEST_LIST = 64
"""Longer lists are watched as a whole, and their numbers are constants."""


def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _TRUSTED


class NoContext:
    """The context of a torch.autograd.Function whose backward is never called."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing is saved."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Nothing is marked."""


class Captures:
    """Makes the copies. One original has one copy, so identity and cycles survive."""

    def __init__(self, tracer: Tracer, root: object) -> None:
        """`root`: the object that the trace is kept with, which its places must not hold."""
        self.tracer = tracer
        self._root = root
        self.watch = Watch()
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._guarded: dict[int, Any] = {}

    def wrap(self, value: Any, name: str) -> tuple[Any, int]:
        """The copy of `value` that a mod may compute with, and its leaf if it is a number or tensor."""
        kind = type(value)
        if kind is int or kind is float or kind is bool:
            number = self.tracer.number(value, name)
            return number, len(self.tracer.leaves) - 1
        if value is None or kind is str:
            return value, NO_LEAF
        if isinstance(value, torch.Tensor):
            leaf = self.tracer.add_leaf(value, name)
            return value, NO_LEAF if self._has_numbers(value) else leaf
        known = self._copies.get(id(value))
        if known is None:
            copy = self._copy(value, kind, name)
            known = self._copies.setdefault(id(value), (value, copy))
        return known[1], NO_LEAF

    def forget(self) -> None:
        """Let go of the copies, which hold each other and what they are copies of."""
        self._copies.clear()

    def _has_numbers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has numbers as attributes: they are watched, and another one is traced again."""
        plain = (int, float, str, tuple)
        numbers = [key for key, value in vars(tensor).items() if isinstance(value, plain)]
        for key in numbers:
            self.watch.items.append(ItemPlace(vars(tensor)[key], NO_LEAF, vars(tensor), key))
        return bool(numbers)

    def _remember(self, value: Any, copy: Any) -> Any:
        self._copies[id(value)] = (value, copy)
        return copy

    def _copy(self, value: Any, kind: type[Any], name: str) -> Any:
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            if isinstance(value.__self__, type) and issubclass(value.__self__, torch.autograd.Function):
                return self._autograd_function(value.__self__, name)
            return MethodType(self.wrap(value.__func__, name)[0], self.wrap(value.__self__, "self")[0])
        if isinstance(value, (functools.partial, Traceable, Composition)):
            return self._callable(value, name)
        if isinstance(value, (tuple, list, dict, set, frozenset, np.ndarray)):
            return self._container(value, name)
        if isinstance(value, ModuleType):
            return value if _is_trusted(value.__name__) else CapturedObject(self, value, name)
        if isinstance(value, type):
            return value if _is_trusted(value.__module__) else CapturedObject(self, value, name)
        if isinstance(value, functools._lru_cache_wrapper):
            return self.wrap(value.__wrapped__, name)[0]
        if isinstance(value, Number) and _is_trusted(kind.__module__):
            return value  # a fraction or decimal: nothing in it can change
        return CapturedObject(self, value, name) if has_attributes(value) else value

    # Functions.

    def _function(self, function: FunctionType) -> Any:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            return self.wrap(original, function.__name__)[0]
        if function.__closure__ is None and _is_trusted(function.__module__):
            return function
        facts = facts_of(function.__code__)
        if facts.assignment is not None:
            name, offset = facts.assignment
            raise MutationInMod(
                f"`{function.__name__}` assigns `{name}`, which outlives the call; a mod is a pure function",
                hint="use a local name",
                span=span_of_instruction(function.__code__, offset),
            )
        read = [name for name in facts.globals if name in function.__globals__]
        captured = read or function.__closure__ or function.__defaults__ or function.__kwdefaults__
        if not captured and not facts.imports:
            return function
        return self._copied_function(function, read)

    def _copied_function(self, function: FunctionType, read: list[str]) -> FunctionType:
        names: dict[str, Any] = {"__name__": function.__module__, "__builtins__": self._builtins(function)}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(
            function.__code__, names, function.__name__, None, cells if function.__closure__ else None
        )
        self._remember(function, copy)
        copy.__qualname__ = function.__qualname__
        for name in read:
            value = function.__globals__[name]
            names[name], leaf = self.wrap(value, name)
            self.watch.items.append(ItemPlace(value, leaf, function.__globals__, name))
        for name, cell, own in zip(
            function.__code__.co_freevars, cells, function.__closure__ or (), strict=True
        ):
            self._cell(own, cell, name)
        if function.__defaults__:
            last = function.__code__.co_argcount
            names_of = function.__code__.co_varnames[last - len(function.__defaults__) : last]
            copy.__defaults__ = tuple(
                self._entry(Defaults(function), place, name)
                for place, name in enumerate(names_of, -len(names_of))
            )
        if function.__kwdefaults__:
            copy.__kwdefaults__ = {
                key: self._entry(Defaults(function), key, key) for key in function.__kwdefaults__
            }
        return copy

    def _builtins(self, function: FunctionType) -> Any:
        """The builtins; where the function imports, modules come as captures too."""
        if not facts_of(function.__code__).imports:
            return builtins
        package = {key: function.__globals__.get(key) for key in ("__package__", "__spec__", "__name__")}

        def import_(
            name: str, _globals: Any = None, _locals: Any = None, names: Any = (), level: int = 0
        ) -> Any:
            return self.wrap(builtins.__import__(name, package, None, names, level), name)[0]

        return vars(builtins) | {"__import__": import_}

    def _cell(self, own: CellType, copy: CellType, name: str) -> None:
        try:
            value = own.cell_contents
        except ValueError:
            return  # assigned later or never: reading it is the NameError that the user expects
        if name == "__class__":  # what super() needs
            copy.cell_contents = value
            self.guard_class(value)
            return
        copy.cell_contents, leaf = self.wrap(value, name)
        self.watch.cells.append(CellPlace(value, leaf, own))

    def _callable(self, value: Any, name: str) -> Any:
        if isinstance(value, Traceable):
            return self.wrap(value.function, name)[0]
        if isinstance(value, Composition):
            return type(value)(*(self.wrap(part, name)[0] for part in value.parts))
        keywords = {key: self._entry(value.keywords, key, key) for key in value.keywords}
        args = (self._entry(value.args, i, f"{name}.args[{i}]") for i in range(len(value.args)))
        return functools.partial(self.wrap(value.func, name)[0], *args, **keywords)

    def _autograd_function(self, cls: type[torch.autograd.Function], name: str) -> Any:
        """What `cls.apply` computes; the gradient of the graph replaces its own."""
        forward = self.wrap(cls.forward, name)[0]
        takes_context = cls.setup_context is torch.autograd.Function.setup_context
        return functools.partial(forward, NoContext()) if takes_context else forward

    # Containers.

    def _entry(self, container: Any, key: Any, name: str) -> Any:
        value = container[key]
        copy, leaf = self.wrap(value, name)
        self.watch.items.append(ItemPlace(value, leaf, container, key))
        return copy

    def _container(self, value: Any, name: str) -> Any:
        if isinstance(value, tuple):
            items = [self._entry(value, i, f"{name}[{i}]") for i in range(len(value))]
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        if isinstance(value, dict):
            self.watch.lengths.append((value, len(value)))
            entries: dict[Any, Any] = self._remember(value, CapturedDict())
            for key in value:
                dict.__setitem__(entries, key, self._entry(value, key, f"{name}[{key!r}]"))
            return entries
        if isinstance(value, list) and len(value) <= _LONGEST_LIST:
            self.watch.lengths.append((value, len(value)))
            copy: list[Any] = self._remember(value, CapturedList())
            for i in range(len(value)):
                list.append(copy, self._entry(value, i, f"{name}[{i}]"))
            return copy
        take = _snapshot_of(value)
        self.watch.snapshots.append((take, take()))
        return value.copy()

    # Attributes.

    def attribute(self, owner: Any, attribute: str, name: str) -> Any:
        """The copy of an attribute, watched. That there is none is watched too, and an AttributeError."""
        value, place = getattr(owner, attribute, Absent), attributes_of(owner, self._root)
        if value is Absent:
            self.watch.attributes.append(AttributePlace(Absent, NO_LEAF, place, attribute))
            return getattr(owner, attribute)
        copy, leaf = self.wrap(value, name)
        self.watch.attributes.append(AttributePlace(value, leaf, place, attribute))
        return copy

    def method(self, owner: Any, attribute: str, name: str) -> Any:
        """The copy of a function of the class of `owner`, watched, and that no attribute hides it."""
        if is_own(owner):
            self.watch.items.append(ItemPlace(Absent, NO_LEAF, Own(owner), attribute))
        return self.attribute(type(owner), attribute, name)

    def guard_class(self, cls: type[Any]) -> None:
        """Watches what methods read that run as they are: after super(), and in instances made in a mod."""
        if id(cls) in self._guarded:
            return
        self._guarded[id(cls)] = cls
        for base in cls.__mro__:
            if not _is_trusted(base.__module__):
                for name, member in vars(base).items():
                    self._guard_member(base, name, member)

    def _guard_member(self, cls: type[Any], name: str, member: Any) -> None:
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(function, FunctionType):
            self._guard_function(function)
        elif isinstance(member, (int, float, str, tuple)) and not name.startswith("__"):
            self._same_attribute(cls, name)

    def _guard_function(self, function: FunctionType) -> None:
        if id(function) in self._guarded:
            return
        self._guarded[id(function)] = function
        values: list[Any] = []
        for name in facts_of(function.__code__).globals:
            if name in function.__globals__:
                values.append(function.__globals__[name])
                self.watch.items.append(ItemPlace(values[-1], NO_LEAF, function.__globals__, name))
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:
                continue
            self.watch.cells.append(CellPlace(values[-1], NO_LEAF, cell))
        for value in values:
            if isinstance(value, FunctionType) and not _is_trusted(value.__module__):
                self._guard_function(value)

    def _same_attribute(self, owner: Any, attribute: str) -> None:
        self.watch.attributes.append(AttributePlace(getattr(owner, attribute), NO_LEAF, owner, attribute))


def _snapshot_of(value: Any) -> Callable[[], Any]:
    if isinstance(value, np.ndarray):
        return lambda: (value.shape, value.dtype, value.tobytes())
    if isinstance(value, list):
        return lambda: tuple(item if isinstance(item, (int, float, str)) else id(item) for item in value)
    return lambda: frozenset(value)
