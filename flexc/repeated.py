"""A launch that is made again and again: only what differs from the last time is written and looked up."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any

import torch

from flexc.counters import address_of_pair
from flexc.parameters import Block, Layout
from flexc.tensor_maps import SIZE, TensorMaps

_PLACES = 256
"""Of which the descriptors of a launch are kept, 512 bytes each."""

Fire = Callable[[Block, int, int, int], None]
"""Launches from a block: programs, device and stream."""


class Repeated:
    """Called with the addresses that are others each time, on the current device, which is the launch's.

    Where tensors lie that are used again and again is soon known, and so are their descriptors.
    """

    def __init__(
        self,
        layout: Layout,
        fire: Fire,
        programs: int,
        device: int,
        values: Sequence[int | float | None],
        counters: int,
        maps: TensorMaps | None,
    ) -> None:
        """`values`: of all arguments but counters and descriptors, which follow them; None: an address."""
        self._fire, self._programs, self._device = fire, programs, device
        self._values = list(values)
        self._places = [place for place, value in enumerate(values) if value is None]
        self._maps, self._counters = maps, counters
        self._block = Block(layout)
        n_maps = 0 if maps is None else len(maps)
        self._block.fill([*(0 if v is None else v for v in values), *[0] * counters, *[bytes(SIZE)] * n_maps])
        offsets = [self._block.start + at for at in layout.of_values]
        self._runs = [
            (struct.Struct(f"={last - first}Q").pack_into, offsets[self._places[first]], first, last)
            for first, last in _runs(self._places)
        ]
        descriptor = struct.Struct(f"={SIZE}s").pack_into
        self._described = [(descriptor, at) for at in offsets[len(values) + counters :]]
        self._counter = (struct.Struct("=Q").pack_into, offsets[len(values)]) if counters else None
        self._known: dict[Any, tuple[bytes, ...]] = {}
        described = [
            n for n, place in enumerate(self._places) if maps is not None and place in maps.addresses
        ]
        self._described_by = itemgetter(*described) if described else None
        self._written: tuple[bytes, ...] | None = None
        self._lock = Lock()

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Launch on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        memory = self._block.memory
        with self._lock:
            for pack_into, at, first, last in self._runs:
                pack_into(memory, at, *addresses[first:last])
            if self._maps is not None:
                self._describe(addresses)
            if self._counter is not None:
                pack_into, at = self._counter
                pack_into(memory, at, address_of_pair(self._device, stream))
            self._fire(self._block, self._programs, self._device, stream)

    def _describe(self, addresses: tuple[int, ...]) -> None:
        assert self._described_by is not None
        key = self._described_by(addresses)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _PLACES:
                self._known.clear()
            values: list[Any] = list(self._values)
            for place, address in zip(self._places, addresses, strict=True):
                values[place] = address
            assert self._maps is not None
            found = self._known[key] = self._maps.values(values, self._device)
        if found is not self._written:
            for (pack_into, at), descriptor in zip(self._described, found, strict=True):
                pack_into(self._block.memory, at, descriptor)
            self._written = found


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """First and end, in the list, of the numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for n, place in enumerate(places):
        if found and places[n - 1] == place - 1:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return found
