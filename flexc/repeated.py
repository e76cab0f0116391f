"""A launch that is made again and again: only what differs from the last time is written and looked up."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from threading import Lock
from typing import Any, Protocol

import torch

from flexc.counters import address_of_pair
from flexc.parameters import Block, Layout
from flexc.tensor_maps import SIZE, TensorMaps

_PLACES = 256
"""Of which the descriptors of a launch are kept, 512 bytes each."""


class Aimed(Protocol):
    """Launches what a block holds."""

    def aim(self, stream: int) -> None:
        """From now on launch on `stream`."""

    def fire(self) -> None:
        """Launch."""


class Repeated:
    """Called with the addresses that are others each time, on the current device, which is the launch's.

    Where nothing moved since the last time, nothing is written. Where tensors lie that are used again and
    again is soon known, and so are their descriptors.
    """

    def __init__(
        self,
        layout: Layout,
        block: Block,
        trigger: Aimed,
        device: int,
        values: Sequence[int | float | None],
        counters: int,
        maps: TensorMaps | None,
    ) -> None:
        """`values`: of all arguments but counters and descriptors, which follow them; None: an address."""
        self._block, self._trigger, self._device = block, trigger, device
        self._values = list(values)
        self._places = [place for place, value in enumerate(values) if value is None]
        self._maps, self._counts = maps, bool(counters)
        n_maps = 0 if maps is None else len(maps)
        block.fill([*(0 if v is None else v for v in values), *[0] * counters, *[bytes(SIZE)] * n_maps])
        offsets = [block.start + at for at in layout.of_values]
        self._runs = [
            (struct.Struct(f"={last - first}Q").pack_into, offsets[self._places[first]], first, last)
            for first, last in _runs(self._places)
        ]
        self._write_counters = struct.Struct("=Q").pack_into
        self._at_counters = offsets[len(values)] if counters else 0
        self._write_descriptors = _in_one(offsets[len(values) + counters :]).pack_into
        self._at_descriptors = offsets[len(values) + counters] if n_maps else 0
        described = [
            n for n, place in enumerate(self._places) if maps is not None and place in maps.addresses
        ]
        self._described_by = itemgetter(*described) if described else None
        self._known: dict[Any, tuple[bytes, ...]] = {}
        self._written: tuple[bytes, ...] | None = None
        self._addresses: tuple[int, ...] | None = None
        self._stream: int | None = None
        self._lock = Lock()

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Launch on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            if addresses != self._addresses:
                self._move(addresses)
            if stream != self._stream or (self._counts and torch._C._cuda_isCurrentStreamCapturing()):
                self._aim(stream)
            self._trigger.fire()

    def _move(self, addresses: tuple[int, ...]) -> None:
        self._addresses = None  # in case that a descriptor can't be made
        memory = self._block.memory
        for pack_into, at, first, last in self._runs:
            pack_into(memory, at, *addresses[first:last])
        if self._described_by is not None:
            found = self._known.get(self._described_by(addresses))
            if found is None:
                found = self._described(addresses)
            if found is not self._written:
                self._written = found
                self._write_descriptors(memory, self._at_descriptors, *found)
        self._addresses = addresses

    def _described(self, addresses: tuple[int, ...]) -> tuple[bytes, ...]:
        """The descriptors of tensors that lie there, from now on known."""
        assert self._maps is not None
        assert self._described_by is not None
        if len(self._known) >= _PLACES:
            self._known.clear()
        values: list[Any] = list(self._values)
        for place, address in zip(self._places, addresses, strict=True):
            values[place] = address
        found = self._known[self._described_by(addresses)] = self._maps.values(values, self._device)
        return found

    def _aim(self, stream: int) -> None:
        """Launch on that stream; a graph that is being captured has counters of its own for each launch."""
        self._stream = None
        if self._counts:
            address = address_of_pair(self._device, stream)
            self._write_counters(self._block.memory, self._at_counters, address)
        self._trigger.aim(stream)
        if not torch._C._cuda_isCurrentStreamCapturing():
            self._stream = stream


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """First and end, in the list, of the numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for n, place in enumerate(places):
        if found and places[n - 1] == place - 1:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return found


def _in_one(offsets: list[int]) -> struct.Struct:
    """Descriptors at these places; between them lie only parameters that nobody reads."""
    gaps = [at - before - SIZE for before, at in pairwise(offsets)]
    return struct.Struct("=" + "".join(f"{gap}x{SIZE}s" for gap in [0, *gaps][: len(offsets)]))
