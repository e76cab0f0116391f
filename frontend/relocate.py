"""Traces of functions that are made anew: `def mask(...)` in a forward is another function at each step.

Its code is the same, and mostly only numbers and tensors in its closure are others. Then what was traced for
one serves the next, once the places where something was read are those of the new closure. Nothing that the
first function held is kept alive for it: tensors are remembered by stand-ins, objects weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch

from flexc.frontend.code import facts_of
from flexc.frontend.compose import Composition, Traceable
from flexc.frontend.watch import NO_LEAF, AttributePlace, CellPlace, ItemPlace, Watch

Hold = Callable[[], Any]
"""Gives an object back. Raises _Unknown when it is no more."""

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool)
_VALUES = (type(None), str, bytes, complex, torch.dtype, torch.device)
_DEEPEST = 16


class _Unknown(Exception):
    """A trace can't be relocated: its function is of another kind, or what it read is no more."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What of a function decides whether a trace serves it, and the cells of its closures, in order."""

    key: tuple[object, ...]
    cells: tuple[CellType, ...]
    held: tuple[object, ...]
    """What the key names by identity, and lives as long as the code does."""


def outline(function: object) -> Outline | None:
    """The outline of a function, or of masks that are put together; None where there is none."""
    walk = _Walk()
    try:
        walk.callable(function, 0)
    except (_Unknown, ValueError):  # a variable of a closure that is not assigned yet
        return None
    return Outline(tuple(walk.key), tuple(walk.cells), tuple(walk.held))


class _Walk:
    def __init__(self) -> None:
        self.key: list[object] = []
        self.cells: list[CellType] = []
        self.held: list[object] = []
        self._seen: dict[int, int] = {}

    def callable(self, value: object, depth: int) -> None:
        if depth > _DEEPEST:
            raise _Unknown
        if isinstance(value, Traceable):
            self.callable(value.function, depth)
        elif isinstance(value, Composition):
            self.key += (type(value), len(value.parts))
            for part in value.parts:
                self.callable(part, depth + 1)
        elif type(value) is FunctionType:
            self._function(value, depth)
        else:
            raise _Unknown

    def _function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        self.key += (id(code), id(function.__globals__), function.__name__)
        self.held += (code, function.__globals__)
        if self._is_known(function):
            return
        if function.__defaults__ or function.__kwdefaults__ or facts_of(code).imports:
            raise _Unknown
        if "_torchdynamo_orig_callable" in function.__dict__:
            raise _Unknown
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":  # what super() needs, which has watches of its own
                raise _Unknown
            self.cells.append(cell)
            self._content(cell.cell_contents, depth)

    def _is_known(self, value: object) -> bool:
        """Whether something was met before, which is a part of the key."""
        first = self._seen.setdefault(id(value), len(self._seen))
        self.key.append(first)
        return first != len(self._seen) - 1

    def _content(self, value: Any, depth: int) -> None:
        kind = type(value)
        self.key.append(kind)
        if kind in _NUMBERS:
            return
        if kind in _TENSORS:
            if value.__dict__:  # which a mod may read
                raise _Unknown
            self._is_known(value)
            self.key += (value.dtype, value.ndim)
        elif kind in _VALUES:
            self.key.append(value)
        elif is_made_anew(value):
            self.callable(value, depth + 1)
        else:
            self.key.append(id(value))


def is_made_anew(value: object) -> bool:
    """Whether a variable holds a function or mask that may be another object next time."""
    return isinstance(value, (FunctionType, Traceable, Composition))


@dataclass(frozen=True, slots=True)
class _Place:
    """A place without what was there: `owner` and `last` are found again when they are needed."""

    owner: Hold
    name: Any
    leaf: int
    last: Hold


@dataclass(frozen=True, slots=True)
class Pattern:
    """The places that one trace read, to be found again from another function of the same outline."""

    cells: tuple[tuple[int, object, int, Hold | None], ...]
    """Which cell, a stand-in for what it holds, its leaf, and what it must hold; None where that is free."""
    items: tuple[_Place, ...]
    attributes: tuple[_Place, ...]
    held: tuple[object, ...]

    def watch(self, cells: tuple[CellType, ...]) -> Watch | None:
        """The watch of a trace of the function that has these cells; None where something is no more."""
        watch = Watch()
        try:
            for number, known, leaf, last in self.cells:
                cell = cells[number]
                if leaf == NO_LEAF:
                    known = cell.cell_contents if last is None else last()
                watch.cells.append(CellPlace(known, leaf, cell))
            for place in self.items:
                watch.items.append(ItemPlace(place.last(), place.leaf, place.owner(), place.name))
            for place in self.attributes:
                watch.attributes.append(AttributePlace(place.last(), place.leaf, place.owner(), place.name))
        except _Unknown:
            return None
        return watch


def pattern_of(watch: Watch, outline: Outline) -> Pattern | None:
    """The pattern of a trace's watch; None where it can't be found again without keeping what it read."""
    numbers = {id(cell): number for number, cell in enumerate(outline.cells)}
    if watch.lengths or watch.snapshots or not all(id(p.cell) in numbers for p in watch.cells):
        return None
    try:
        return Pattern(
            tuple(
                (numbers[id(p.cell)], stand_in(p.last), p.leaf, _content_of(p.last, p.leaf))
                for p in watch.cells
            ),
            tuple(_place(_names(p.container), p.key, p.leaf, p.last) for p in watch.items),
            tuple(_place(weakly(p.owner), p.name, p.leaf, p.last) for p in watch.attributes),
            outline.held,
        )
    except _Unknown:
        return None


def _content_of(value: object, leaf: int) -> Hold | None:
    return None if leaf != NO_LEAF or is_made_anew(value) else weakly(value)


def _place(owner: Hold, name: Any, leaf: int, last: object) -> _Place:
    return _Place(owner, name, leaf, weakly(last) if leaf == NO_LEAF else strongly(stand_in(last)))


def stand_in(value: Any) -> Any:
    """Something that holds no memory, of which a trace depends on no more than of `value`."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise _Unknown
        return torch.empty((0,) * value.ndim, dtype=value.dtype, device="meta")
    return value if isinstance(value, (*_NUMBERS, *_VALUES)) else None


def strongly(value: Any) -> Hold:
    """Keeps the value."""
    return lambda: value


def weakly(value: Any) -> Hold:
    """Does not keep the value, unless it is a plain one. Raises _Unknown for what can't be held so."""
    if isinstance(value, (*_NUMBERS, *_VALUES)):
        return strongly(value)
    try:
        reference = weakref.ref(value)
    except TypeError:
        raise _Unknown from None

    def living() -> Any:
        found = reference()
        if found is None:
            raise _Unknown
        return found

    return living


def _names(container: Any) -> Hold:
    """The names of a module, which live as long as its functions do; no other container is watched."""
    if not isinstance(container, dict) or not isinstance(container.get("__name__"), str):
        raise _Unknown
    return strongly(container)
