"""Traces of functions that are made anew: `def mask(...)` in a forward is another function at each step.

Its code is the same, and mostly only numbers and tensors that it captured are others. Then what was traced
for one serves the next, once the places where something was read are those of the new function. Nothing that
the first function held is kept alive for it: tensors are remembered by stand-ins, objects weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch

from flexc.frontend.code import facts_of
from flexc.frontend.outline import CONTENT, NUMBERS, VALUES, Outline, Unknown, outline
from flexc.frontend.owners import Defaults, Own, identity_of
from flexc.frontend.watch import NO_LEAF, Absent, AttributePlace, CellPlace, ItemPlace, Leaves, Watch

Hold = Callable[[], Any]
"""Gives an object back. Raises Unknown when it is no more."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A variable of a closure, without what it held."""

    owner: int
    leaf: int
    last: Hold | None
    """What it must hold, or a stand-in for a leaf; None where that is free."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place without what was there: `owner` and `last` are found again when they are needed."""

    owner: int | Hold
    """A number among the owners of the outline, or a thing that is the same each time."""
    name: Any
    leaf: int
    last: Hold | None
    """What must be there, or a stand-in for a leaf; None where that is free."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """The places that one trace read, to be found again from another function of the same outline."""

    cells: tuple[_Cell, ...]
    items: tuple[_Place, ...]
    attributes: tuple[_Place, ...]
    lengths: tuple[tuple[int, int], ...]
    held: tuple[object, ...]

    def read(self, owners: tuple[Any, ...], leaves: list[Any]) -> Watch | None:
        """The watch of a trace of the function that has these owners; what is there is written into `leaves`.

        None where something is no more, or is of another kind.
        """
        watch, found = Watch(), Leaves(leaves)
        try:
            for cell in self.cells:
                owner = owners[cell.owner]
                here, last = owner.cell_contents, cell.last
                if last is not None and not found.take(last(), here, cell.leaf):
                    return None
                watch.cells.append(CellPlace(here, cell.leaf, owner))
            for places, get, kind, into in (
                (self.items, getitem, ItemPlace, watch.items),
                (self.attributes, _attribute, AttributePlace, watch.attributes),
            ):
                for place in places:
                    owner = owners[place.owner] if isinstance(place.owner, int) else place.owner()
                    here, last = get(owner, place.name), place.last
                    if last is not None and not found.take(last(), here, place.leaf):
                        return None
                    into.append(kind(here, place.leaf, owner, place.name))  # type: ignore[arg-type]
        except (Unknown, ValueError, LookupError, AttributeError):
            return None
        watch.lengths += [(owners[number], length) for number, length in self.lengths]
        return watch


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, Absent)


def pattern_of(watch: Watch, outline: Outline) -> Pattern | None:
    """The pattern of a trace's watch; None where it can't be found again without keeping what it read."""
    numbers = {identity_of(owner): number for number, owner in enumerate(outline.owners)}
    if watch.snapshots or not watch.compared.isdisjoint(numbers):
        return None
    if any(facts_of(code).imports for code in outline.codes):
        return None

    def place(owner: object, name: Any, leaf: int, last: object, hold: Callable[[Any], Hold]) -> _Place:
        number = numbers.get(identity_of(owner))
        found = _last(last, leaf, is_free=(number, name) in outline.free)
        return _Place(hold(owner) if number is None else number, name, leaf, found)

    def cell(place: CellPlace) -> _Cell:
        number = _known(numbers, place.cell)
        last = _last(place.last, place.leaf, is_free=(number, CONTENT) in outline.free)
        return _Cell(number, place.leaf, last)

    try:
        return Pattern(
            tuple(map(cell, watch.cells)),
            tuple(place(p.container, p.key, p.leaf, p.last, _names) for p in watch.items),
            tuple(place(p.owner, p.name, p.leaf, p.last, weakly) for p in watch.attributes),
            tuple((_known(numbers, container), length) for container, length in watch.lengths),
            (*outline.codes, *outline.held),
        )
    except Unknown:
        return None


def _known(numbers: dict[object, int], owner: object) -> int:
    number = numbers.get(identity_of(owner))
    if number is None:
        raise Unknown
    return number


def _last(last: object, leaf: int, *, is_free: bool) -> Hold | None:
    if leaf != NO_LEAF:
        return strongly(stand_in(last))
    return None if is_free else weakly(last)


def stand_in(value: Any) -> Any:
    """Something that holds no memory, of which a trace depends on no more than of `value`."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise Unknown
        return torch.empty((0,) * value.ndim, dtype=value.dtype, device="meta")
    return value if isinstance(value, (*NUMBERS, *VALUES)) else None


def strongly(value: Any) -> Hold:
    """Keeps the value."""
    return lambda: value


def weakly(value: Any) -> Hold:
    """Does not keep the value, unless it is a plain one. Raises Unknown for what can't be held so."""
    if _is_plain(value):
        return strongly(value)
    try:
        reference = weakref.ref(value)
    except TypeError:
        raise Unknown from None

    def living() -> Any:
        found = reference()
        if found is None:
            raise Unknown
        return found

    return living


def _names(container: Any) -> Hold:
    """The names of a module, which live as long as its functions do; no other container is held."""
    is_module = isinstance(container, dict) and isinstance(container.get("__name__"), str)
    if not is_module and not isinstance(container, (Defaults, Own)) and not _is_plain(container):
        raise Unknown
    return strongly(container)


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a name or a dtype, or a tuple of such."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, (*NUMBERS, *VALUES))


__all__ = ["Outline", "Pattern", "outline", "pattern_of", "stand_in"]
