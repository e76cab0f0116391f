"""How a call is cut for the CPU's cores, and what every piece of it sees: shared by forward and backward.

A tile is some batches and heads, a block of query rows of each, and the key columns that the block map lets
these rows see, in chunks of up to a few thousand. Query heads that share a key head are folded into the rows
of one matrix product, so keys and values are never repeated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flexc.call import AttentionCall
from flexc.chunks import Chunk, chunks, runs_of_row
from flexc.ir.blockmap import BlockMap
from flexc.ir.evaluate import Env, evaluate_all
from flexc.ir.expr import Expr
from flexc.ir.ops import Input
from flexc.philox import kept

BLOCK_Q = 128
BLOCK_KV = 64
# Scores that a core holds at a time: 1 MB in fp32, to fit its second-level cache.
_TILE_SCORES = 1 << 18
_LEAST_WIDTH = 128
_MOST_WIDTH = 4096
# Rows of a matrix product, over which more of them no longer make it faster.
_MOST_ROWS = 2048

Inputs = dict[Input, torch.Tensor | int]


@dataclass(frozen=True, slots=True)
class Unit:
    """Batches, query heads and their key heads that are computed together: half-open ranges."""

    batch: tuple[int, int]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of batches, of key heads, and of query heads that share a key head."""
        kv_heads = self.kv_heads[1] - self.kv_heads[0]
        return self.batch[1] - self.batch[0], kv_heads, (self.heads[1] - self.heads[0]) // kv_heads

    def queries(self, x: torch.Tensor, rows: tuple[int, int]) -> torch.Tensor:
        """The part of `x` (B, Hq, L, ...) that belongs to this unit and these rows, a view."""
        return x[slice(*self.batch), slice(*self.heads), slice(*rows)]

    def keys(self, x: torch.Tensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The columns of k or v (B, Hkv, S, D) that belong to this unit, (batch * key heads, n, D)."""
        part = chunk.take(x[slice(*self.batch), slice(*self.kv_heads)])
        return part.to(dtype).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Tile:
    """A unit, a half-open range of query rows, and the columns that these visit."""

    unit: Unit
    rows: tuple[int, int]
    visited: list[Chunk]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Number of batches, key heads, query heads a key head, and rows."""
        return (*self.unit.shape, self.rows[1] - self.rows[0])

    @property
    def matrices(self) -> tuple[int, int]:
        """Number of matrix products of a step, and of rows in each."""
        batches, kv_heads, group, count = self.shape
        return batches * kv_heads, group * count


@dataclass(frozen=True, slots=True)
class Plane:
    """What the block map has one plane of: its index among them, and the units that share it.

    `width` is how many columns of a unit fit together.
    """

    index: int
    units: list[Unit]
    width: int


class Cut:
    """A call cut into planes of the block map, these into units, and units into tiles."""

    def __init__(self, call: AttentionCall, block_map: BlockMap | None) -> None:
        self._call = call
        self._map = block_map
        self._q_len = q_len = call.q.shape[2]
        group = call.q.shape[1] // call.k.shape[1]
        self._block_q = BLOCK_Q if block_map is None else block_map.block_q
        self._rows = max(1, min(self._block_q, q_len, BLOCK_Q, max(16, _MOST_ROWS // group)))
        self.blocks = -(-q_len // self._block_q)

    def planes(self) -> Iterator[Plane]:
        """The planes: one where all batches and heads share it."""
        batches, heads = (1, 1) if self._map is None else (self._map.batch, self._map.heads)
        for index, (b, h) in enumerate(itertools.product(range(batches), range(heads))):
            units = self._units(b if batches > 1 else None, h if heads > 1 else None)
            largest = max((math.prod(unit.shape) for unit in units), default=1)
            width = min(max(_TILE_SCORES // (largest * self._rows), _LEAST_WIDTH), _MOST_WIDTH)
            yield Plane(index, units, width)

    def tiles(self, plane: Plane, block: int, units: Sequence[Unit]) -> Iterator[Tile]:
        """The tiles of a block of queries, of some units of a plane."""
        if self._map is None:
            visited = chunks([(0, self._call.k.shape[2], False)], plane.width)
        else:
            visited = chunks(runs_of_row(self._map, plane.index * self.blocks + block), plane.width)
        stop = min((block + 1) * self._block_q, self._q_len)
        for first in range(block * self._block_q, stop, self._rows):
            for unit in units:
                yield Tile(unit, (first, min(first + self._rows, stop)), visited)

    def _units(self, b: int | None, h: int | None) -> list[Unit]:
        """The units of a batch and head of the map (None: all share it)."""
        batch, heads, kv_heads = self._call.q.shape[0], self._call.q.shape[1], self._call.k.shape[1]
        group = heads // kv_heads
        batches = range(batch) if b is None else range(b, b + 1)
        if h is not None:
            together = max(1, _TILE_SCORES // (self._rows * _LEAST_WIDTH))
            kv = (h // group, h // group + 1)
            return [Unit(part, (h, h + 1), kv) for part in _parts(batches, together)]
        together = max(1, _TILE_SCORES // (group * self._rows * _LEAST_WIDTH))
        return [
            Unit(part, (kv[0] * group, kv[1] * group), kv)
            for part in _parts(batches, max(1, together // kv_heads))
            for kv in _parts(range(kv_heads), together)
        ]


def _parts(items: range, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, items.stop)) for start in range(items.start, items.stop, size)]


def computed_in(call: AttentionCall) -> torch.dtype:
    """What everything is computed in: fp64 for fp64 queries, else fp32."""
    return torch.float64 if call.q.dtype is torch.float64 else torch.float32


def inputs_of(call: AttentionCall, tile: Tile) -> Inputs:
    """What mods are called with, in shapes that broadcast over (batch, key head, group, row, column)."""
    unit = tile.unit
    batches, kv_heads, group = unit.shape
    return {
        Input.B: torch.arange(*unit.batch, dtype=torch.int32, device="cpu").view(batches, 1, 1, 1, 1),
        Input.H: torch.arange(*unit.heads, dtype=torch.int32, device="cpu").view(kv_heads, group, 1, 1),
        Input.Q_IDX: torch.arange(*tile.rows, dtype=torch.int32, device="cpu").view(-1, 1),
        Input.Q_LEN: call.q.shape[2],
        Input.KV_LEN: call.k.shape[2],
    }


def values_of(
    call: AttentionCall, roots: tuple[Expr, ...], inputs: Inputs, more: Inputs
) -> tuple[torch.Tensor, ...]:
    """The values of graphs over a part of a tile, of its shape or smaller where they read less."""
    return evaluate_all(roots, Env({**inputs, **more}, call.values, torch, computed_in(call)))


def modified(call: AttentionCall, scores: torch.Tensor, inputs: Inputs, chunk: Chunk) -> torch.Tensor:
    """Scores after the score_mod, -inf where the mask does not hold; may overwrite `scores`.

    `scores` (batch, key head, group, row, column). Without a score_mod the result is `scores` itself.
    """
    if call.score is not None:
        (result,) = values_of(call, (call.score,), inputs, {Input.SCORE: scores, Input.KV_IDX: chunk.kv_idx})
        if result.shape != scores.shape or result is scores:
            result = result.expand(scores.shape).clone()
        scores = result
    if call.mask is not None:
        for segment in chunk.masked:
            (visible,) = values_of(call, (call.mask,), inputs, {Input.KV_IDX: segment.kv_idx})
            scores[..., segment.low : segment.high].masked_fill_(~visible, -math.inf)
    return scores


def kept_of(call: AttentionCall, tile: Tile, inputs: Inputs, chunk: Chunk) -> torch.Tensor | None:
    """Which pairs dropout keeps, bool of (batch, key head, group, row, column); None without dropout."""
    if call.dropout_p == 0.0:
        return None
    b, h, q_idx = inputs[Input.B], inputs[Input.H], inputs[Input.Q_IDX]
    assert isinstance(b, torch.Tensor)
    assert isinstance(h, torch.Tensor)
    assert isinstance(q_idx, torch.Tensor)
    stream = b.to(torch.int64) * call.q.shape[1] + h
    return kept(int(call.dropout_seed), call.dropout_p, stream, q_idx, chunk.kv_idx)
