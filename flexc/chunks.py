"""Which key columns a tile of query rows visits, cut into chunks of bounded width.

Chunks go by the order of the columns and are cut without regard to whether a block is PARTIAL or FULL, so
that listing a block as one or the other gives the same bits where the mask holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from flexc.ir.blockmap import BlockMap, TileKind


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring columns `[low, high)` of a chunk under the mask, and their kv positions."""

    low: int
    high: int
    kv_idx: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Columns that one step of the online softmax reads.

    `kv_idx` (n,) int32 are their positions. They are `[start, start + n)` where `start` is not None;
    otherwise there are gaps between them.
    """

    kv_idx: torch.Tensor
    start: int | None
    masked: tuple[Segment, ...]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """These columns of `x` (..., S, D), as a view where they have no gaps."""
        if self.start is not None:
            return x.narrow(-2, self.start, len(self.kv_idx))
        return x.index_select(-2, self.kv_idx)


@dataclass(slots=True)
class _Draft:
    """A chunk being filled: ranges of columns, and local ranges under the mask. Neighbours join."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    masked: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0

    def add(self, start: int, stop: int, is_masked: bool) -> None:
        low, self.size = self.size, self.size + stop - start
        _join(self.ranges, start, stop)
        if is_masked:
            _join(self.masked, low, self.size)

    def finish(self) -> Chunk:
        parts = [torch.arange(start, stop, dtype=torch.int32, device="cpu") for start, stop in self.ranges]
        kv_idx = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Chunk(
            kv_idx=kv_idx,
            start=self.ranges[0][0] if len(parts) == 1 else None,
            masked=tuple(Segment(low, high, kv_idx[low:high]) for low, high in self.masked),
        )


def _join(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        start = ranges.pop()[0]
    ranges.append((start, stop))


def chunks(runs: Iterable[tuple[int, int, bool]], width: int) -> list[Chunk]:
    """Runs of columns `(start, stop, masked)` in ascending order, as chunks of at most `width` columns."""
    result: list[Chunk] = []
    draft = _Draft()
    for first, stop, masked in runs:
        start = first
        while start < stop:
            step = min(stop - start, width - draft.size)
            draft.add(start, start + step, masked)
            start += step
            if draft.size == width:
                result.append(draft.finish())
                draft = _Draft()
    if draft.size:
        result.append(draft.finish())
    return result


def runs_of_row(block_map: BlockMap, row: int) -> Iterator[tuple[int, int, bool]]:
    """The runs `(start column, stop column, masked)` of a row of the map, within the kv length."""
    low, high = int(block_map.offsets[row]), int(block_map.offsets[row + 1])
    for first, end, kind in block_map.runs[low:high].tolist():
        stop = min(end * block_map.block_kv, block_map.kv_len)
        yield first * block_map.block_kv, stop, kind == TileKind.PARTIAL
