"""What a trace read and where, so that a later call can read it again without tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from types import CellType
from typing import Any, NamedTuple

import torch

NO_LEAF = -1
_IMMUTABLE = (str, bytes, complex, Fraction, torch.device)


class Absent:
    """Stands for an attribute that an object did not have."""


class CellPlace(NamedTuple):
    """A variable of an enclosing function.

    Here and below, `last` is what was there, and `leaf` the number of that number or tensor; NO_LEAF when it
    must stay the same object.
    """

    last: Any
    leaf: int
    cell: CellType


class ItemPlace(NamedTuple):
    """A global name, a default, or an entry of a tuple, list or dict."""

    last: Any
    leaf: int
    container: Any
    key: Any


class AttributePlace(NamedTuple):
    """An attribute of an object."""

    last: Any
    leaf: int
    owner: Any
    name: str


Place = CellPlace | ItemPlace | AttributePlace


@dataclass(slots=True)
class Watch:
    """All places of one trace. Reading them again takes some 40 ns each."""

    cells: list[CellPlace] = field(default_factory=list)
    items: list[ItemPlace] = field(default_factory=list)
    attributes: list[AttributePlace] = field(default_factory=list)
    lengths: list[tuple[Any, int]] = field(default_factory=list)
    snapshots: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    compared: set[object] = field(default_factory=set)
    """The identities of objects that were compared or asked as a whole, not by what is read of them."""

    def places(self) -> list[Place]:
        """All of them."""
        return [*self.cells, *self.items, *self.attributes]

    def compile(
        self,
        tensors: tuple[tuple[torch.Tensor, torch.dtype, int], ...],
        shapes: tuple[tuple[torch.Tensor, tuple[int, ...]], ...],
    ) -> Checks:
        """The places as plain tuples, for the quick check, with the tensors that were read.

        `tensors` with their dtypes and ranks, and `shapes` of those whose shape was asked for.
        """
        return Checks(
            tuple((p.cell, p.last) for p in self.cells),
            tuple((p.container, p.key, p.last) for p in self.items),
            tuple((p.owner, p.name, p.last) for p in self.attributes),
            tuple(self.lengths),
            tuple(self.snapshots),
            tensors,
            shapes,
        )

    def reread(self, leaves: list[Any]) -> Watch | None:
        """Writes what has changed into `leaves`.

        None where something else than a number or tensor changed.
        """
        again = Watch(lengths=self.lengths, snapshots=self.snapshots, compared=self.compared)
        try:
            for cell in self.cells:
                again.cells.append(CellPlace(cell.cell.cell_contents, cell.leaf, cell.cell))
            for item in self.items:
                again.items.append(ItemPlace(item.container[item.key], item.leaf, item.container, item.key))
            for place in self.attributes:
                value = getattr(place.owner, place.name, Absent)
                again.attributes.append(AttributePlace(value, place.leaf, place.owner, place.name))
        except (ValueError, LookupError, AttributeError):
            return None  # deleted: the mod itself will say so
        found = Leaves(leaves)
        for old, new in zip(self.places(), again.places(), strict=True):
            if not found.take(old.last, new.last, new.leaf):
                return None
        return again


class Leaves:
    """What was read, as it is read anew from one place after another."""

    __slots__ = ("_values", "_written")

    def __init__(self, values: list[Any]) -> None:
        """`values` are written."""
        self._values = values
        self._written: set[int] = set()

    def take(self, old: Any, new: Any, leaf: int) -> bool:
        """Whether a trace that found `old` in a place serves where `new` is found."""
        if leaf == NO_LEAF:
            return same(old, new)
        if leaf in self._written:  # one tensor found in two places may be two tensors now
            return self._values[leaf] is new
        if not alike(old, new):
            return False
        self._written.add(leaf)
        self._values[leaf] = new
        return True


def same(old: Any, new: Any) -> bool:
    """Whether an opaque thing is unchanged: the same object, or an equal immutable one."""
    if old is new:
        return True
    return type(old) is type(new) and type(old) in _IMMUTABLE and bool(old == new)


def alike(old: Any, new: Any) -> bool:
    """Whether a graph traced with one value serves the other."""
    if isinstance(old, torch.Tensor):
        return (
            isinstance(new, torch.Tensor)
            and old.dtype is new.dtype
            and old.ndim == new.ndim
            and old.layout is new.layout
        )
    return type(old) is type(new)


@dataclass(frozen=True, slots=True)
class Checks:
    """The quick check of a watch: everything read is still the same object."""

    cells: tuple[tuple[CellType, Any], ...]
    items: tuple[tuple[Any, Any, Any], ...]
    attributes: tuple[tuple[Any, str, Any], ...]
    lengths: tuple[tuple[Any, int], ...]
    snapshots: tuple[tuple[Callable[[], Any], Any], ...]
    tensors: tuple[tuple[torch.Tensor, torch.dtype, int], ...]
    shapes: tuple[tuple[torch.Tensor, tuple[int, ...]], ...]

    def contents_hold(self) -> bool:
        """Whether lists, dicts, sets and arrays have the contents that were seen."""
        for container, length in self.lengths:
            if len(container) != length:
                return False
        return not self.snapshots or all(take() == seen for take, seen in self.snapshots)

    def tensors_hold(self) -> bool:
        """Whether the tensors that were read have their dtypes and ranks.

        `.data =` can change them in place.
        """
        for tensor, dtype, rank in self.tensors:
            if tensor.dtype is not dtype or tensor.ndim != rank:
                return False
        return True

    def unchanged(self) -> bool:
        """Whether nothing at all has changed, down to the dtypes and shapes of tensors."""
        try:
            for cell, last in self.cells:
                if cell.cell_contents is not last:
                    return False
            for container, key, last in self.items:
                if container[key] is not last:
                    return False
            for owner, name, last in self.attributes:
                if getattr(owner, name, Absent) is not last:
                    return False
        except (ValueError, LookupError):
            return False
        for tensor, shape in self.shapes:
            if tensor.shape != shape:
                return False
        for tensor, dtype, rank in self.tensors:
            if tensor.dtype is not dtype or tensor.ndim != rank:
                return False
        return not (self.lengths or self.snapshots) or self.contents_hold()
