"""Gradients of captured tensors on the CPU: where tiles add their parts, and in which order.

Small tensors have one sum for each group of tiles, and these are added in the order of the groups. A large
one (a bias for every pair) has one sum for all: then tiles that may meet in an element belong to one group,
which is worked through in order. So the result is the same from run to run, whatever the threads do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flexc.cpu_tiles import Unit
from flexc.ir.adjoint import AXES, Scatter
from flexc.ir.ops import Input, Op

# Sums of up to this many elements are in fp64, and every group of tiles has its own.
_SMALL = 1 << 20
_PRIVATE_BYTES = 64 << 20
# Which dimensions of (batch, key head, group, row, column) an index goes along.
_DIMENSIONS = {Input.B: (0,), Input.H: (1, 2), Input.Q_IDX: (3,), Input.KV_IDX: (4,)}


@dataclass(frozen=True, slots=True)
class Lane:
    """Tiles that are worked through one after another: those of some units in every `parts`-th block."""

    units: tuple[tuple[int, Unit], ...]
    """With the indices of their planes."""
    part: int


class Captured:
    """The sums of all captured tensors that need a gradient; by slot."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], scatters: Sequence[Scatter], groups: int) -> None:
        self._tensors = tensors
        self._scatters = scatters
        self._shared = {
            slot
            for slot, x in tensors.items()
            if x.numel() > _SMALL or x.numel() * 8 * groups * len(tensors) > _PRIVATE_BYTES
        }
        self._whole = {slot: self._zeros(slot) for slot in self._shared}
        self._parts: list[dict[int, torch.Tensor]] = []

    def _zeros(self, slot: int) -> torch.Tensor:
        x = self._tensors[slot]
        wide = x.numel() <= _SMALL or x.dtype is torch.float64
        return torch.zeros(x.numel(), dtype=torch.float64 if wide else torch.float32, device="cpu")

    def apart(self, lane: Lane) -> tuple[object, ...]:
        """Lanes for which this differs never add to one element of a shared sum."""
        unit = lane.units[0][1]
        key: list[object] = []
        for axis, place in ((Input.B, unit.batch), (Input.H, unit.kv_heads), (Input.Q_IDX, lane.part)):
            if all(self._tells_apart(slot, axis) for slot in self._shared):
                key.append(place)
        return tuple(key)

    def _tells_apart(self, slot: int, axis: Input) -> bool:
        """Whether one dimension of the tensor is read at nothing but `axis` itself."""
        found: set[int] | None = None
        for scatter in self._scatters:
            if scatter.slot == slot:
                here = {d for d, i in enumerate(scatter.indices) if i.op is Op.INPUT and i.attr is axis}
                found = here if found is None else found & here
        return found is None or bool(found)

    def group(self) -> dict[int, torch.Tensor]:
        """The sums that one more group of tiles adds to. Called in the order of the groups."""
        part = {
            slot: self._whole[slot] if slot in self._shared else self._zeros(slot) for slot in self._tensors
        }
        self._parts.append(part)
        return part

    def result(self, slot: int) -> torch.Tensor | None:
        """The gradient of the tensor in `slot`, of its shape and dtype; None for one that needs none."""
        if slot not in self._tensors:
            return None
        x = self._tensors[slot]
        if slot in self._shared:
            total = self._whole[slot]
        else:
            total = self._zeros(slot)
            for part in self._parts:
                total += part[slot]
        return total.view(x.shape).to(x.dtype)


def add_scattered(
    total: torch.Tensor,
    like: torch.Tensor,
    scatter: Scatter,
    indices: Sequence[torch.Tensor],
    values: torch.Tensor,
) -> None:
    """Add the values of a chunk where they belong in a captured tensor's sum.

    Args:
        total: the sum, flat, of the elements of `like`.
        like: the captured tensor.
        scatter: which of its elements; says what can be summed first.
        indices: the values of its indices, broadcastable to the chunk's shape.
        values: one a pair, (batch, key head, group, row, column), 0 where a pair is hidden.
    """
    unused = [d for axis in AXES if axis not in scatter.axes for d in _DIMENSIONS[axis]]
    summed = values.sum(unused, keepdim=True, dtype=total.dtype) if unused else values.to(total.dtype)
    if not indices or total.numel() == 0:
        if total.numel():
            total += summed.sum()
        return
    flat = torch.zeros((), dtype=torch.int64, device="cpu")
    inside: torch.Tensor | None = None
    for value, length, what in zip(indices, like.shape, scatter.indices, strict=True):
        index = value.to(torch.int64)
        if what.op is not Op.INPUT:  # a batch, a head, a row or a column is never negative
            index = torch.where(index < 0, index + length, index)
        valid = (index >= 0) & (index < length)
        inside = valid if inside is None else inside & valid
        flat = flat * length + index
    assert inside is not None
    if not bool(inside.all()):
        summed = torch.where(inside, summed, 0.0)
        flat = torch.where(inside, flat, 0)
    where, what_is_added = flat.expand(summed.shape).reshape(-1), summed.reshape(-1)
    if total.dtype is torch.float64 and len(total) <= len(where):
        total += torch.bincount(where, what_is_added, minlength=len(total))  # three times faster
    else:
        total.index_add_(0, where, what_is_added)
