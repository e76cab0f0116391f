"""A block map that stays on the device of the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from flexc.ir.arrays import Array
from flexc.ir.blockmap import BlockMap
from flexc.ir.runs import TileGrid
from flexc.ir.stretches import from_stretches

FEW_STRETCHES, MANY_STRETCHES, MOST_AT_ONCE = 64, 256, 2**20
"""Stretches that a row of a map built on a device may have.

Few where its mask allows a few exact ranges of keys, else many, unless all rows would have more than the
most at once. A map's memory is taken before it is known how much of it is needed, and that must not wait for
the device. In a row that has more stretches, the last one holds all tiles that follow as PARTIAL ones:
attention then evaluates the mask in tiles that it need not have looked at.
"""


@dataclass(slots=True, weakref_slot=True, eq=False)
class DeviceMap:
    """The stretches of a map (`ir/stretches.py`) on a device; those that no offset reaches are unused.

    Has the lengths, block sizes, batches and heads of a `BlockMap`, and can become one.
    """

    grid: TileGrid
    offsets: torch.Tensor  # int32 [rows + 1]
    stretches: torch.Tensor  # int32 [at least offsets[rows], 4]
    is_open: bool = True
    """Its rows may have many stretches: they are not a few exact ranges of keys."""
    origin: object = None
    """Equal for maps of one mask over the same tensors, lengths and blocks; None: not known."""
    _host: BlockMap | None = field(default=None, repr=False)
    _built: tuple[int, torch.cuda.Event] | None = field(default=None, repr=False)

    @property
    def q_len(self) -> int:
        """Queries."""
        return self.grid.q_len

    @property
    def kv_len(self) -> int:
        """Keys."""
        return self.grid.kv_len

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return self.grid.block_q

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return self.grid.block_kv

    @property
    def batch(self) -> int:
        """Batches that differ: 1 where the mask does not read `b`."""
        return self.grid.batch

    @property
    def heads(self) -> int:
        """Heads that differ: 1 where the mask does not read `h`."""
        return self.grid.heads

    @property
    def q_blocks(self) -> int:
        """Blocks of queries of one batch and head."""
        return self.grid.q_blocks

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys."""
        return self.grid.kv_blocks

    @property
    def device(self) -> torch.device:
        """Where the map is."""
        return self.offsets.device

    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, partial and full. Waits for the device."""
        return self.host().counts()

    def sparsity(self) -> float:
        """The percentage of tiles that are empty. Waits for the device."""
        return self.host().sparsity()

    def kinds(self, b: int = 0, h: int = 0) -> Array:
        """The kinds of one batch and head, as `BlockMap.kinds` on the host. Waits for the device."""
        return self.host().kinds(b, h)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles hold the tensors, and neither where the map is from nor how it was built."""
        ready = self.ready_here()
        return DeviceMap, (ready.grid, ready.offsets, ready.stretches)

    def built_here(self) -> None:
        """Note that the work queued on the current stream so far builds the map."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._built = (torch._C._cuda_getCurrentRawStream(self.device.index), event)

    def ready_here(self) -> DeviceMap:
        """The map, for what is queued on the current stream next: that waits for a build on another stream.

        Not inside the capture of a CUDA graph: graphs wait for nothing outside them when they are captured.
        """
        if self._built is not None and not torch.cuda.is_current_stream_capturing():
            stream, event = self._built
            if torch._C._cuda_getCurrentRawStream(self.device.index) != stream:
                here = torch.cuda.current_stream(self.device)
                here.wait_event(event)
                self.offsets.record_stream(here)
                self.stretches.record_stream(here)
        return self

    def host(self) -> BlockMap:
        """The map as runs on the host. Waits for the device, once."""
        if self._host is None:
            self.ready_here()
            offsets = self.offsets.cpu().numpy()
            used = int(offsets[-1])
            stretches = self.stretches[:used].cpu().numpy() if used else np.zeros((0, 4), np.int32)
            self._host = from_stretches(self.grid, offsets, stretches)
        return self._host


Map = BlockMap | DeviceMap


def on_host(block_map: Map) -> BlockMap:
    """The map as runs on the host; of one on a device this waits for the device."""
    return block_map.host() if isinstance(block_map, DeviceMap) else block_map


def row_capacity(grid: TileGrid, *, is_open: bool) -> int:
    """How many stretches a row of a map on a device may have."""
    most = FEW_STRETCHES
    if is_open:
        most = max(most, min(MANY_STRETCHES, MOST_AT_ONCE // max(1, grid.rows)))
    return max(1, min((grid.kv_blocks + 1) // 2, most))


def empty_map(grid: TileGrid, device: torch.device) -> DeviceMap:
    """A map in which no tile is visited."""
    return DeviceMap(grid, torch.zeros(grid.rows + 1, dtype=torch.int32, device=device), ints(device, 0, 4))


def ints(device: torch.device, *shape: int) -> torch.Tensor:
    """Integers of 32 bits that are yet to be written."""
    return torch.empty(shape, dtype=torch.int32, device=device)
