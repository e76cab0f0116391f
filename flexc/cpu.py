"""Block-sparse attention on the CPU: tile by tile, online softmax, memory linear in the lengths.

A tile is some batches and heads, a block of query rows of each, and up to a few thousand of the key columns
that the block map lets these rows see. Query heads that share a key head are folded into the rows of one
matrix product, so keys and values are never repeated. The mask is evaluated in partial blocks only; empty
blocks are not read.

The online softmax is that of M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexc.call import AttentionCall
from flexc.columns import Chunk, chunks, runs_of_row
from flexc.ir.blockmap import BlockMap
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input
from flexc.map_cache import effective_block_map
from flexc.values import weigh_values
from flexc.workers import run_each

BLOCK_Q = 128
BLOCK_KV = 64
# Scores that a core holds at a time: 1 MB in fp32, to fit its second-level cache.
_TILE_SCORES = 1 << 18
_LEAST_WIDTH = 128
_MOST_WIDTH = 4096
# Rows of a matrix product, over which more of them no longer make it faster.
_MOST_ROWS = 2048


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


@dataclass(slots=True)
class _State:
    """The online softmax of a tile: row maximum and sum (n, rows, 1), unnormalised output (n, rows, Dv)."""

    maximum: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor | None = None


@torch.no_grad()
def run(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the call in fp32 (fp64 for fp64 queries), rounded once to the dtype of q.

    Returns out (B, Hq, L, Dv) and lse (B, Hq, L), fp32 (fp64 for fp64 queries), or None where it is not asked
    for.
    """
    batch, heads, q_len, _ = call.q.shape
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    out = call.out
    if out is None:
        out = call.q.new_empty((batch, heads, q_len, call.v.shape[3]))
    lse = call.q.new_empty((batch, heads, q_len), dtype=dtype) if call.return_lse else None
    block_map = effective_block_map(call, BLOCK_Q, BLOCK_KV)

    def work(tile: Tile) -> None:
        _store(_attend(call, tile, dtype), tile, out, lse)

    with torch.autocast("cpu", enabled=False):
        run_each(work, _tiles(call, block_map))
    return out, lse


def _tiles(call: AttentionCall, block_map: BlockMap | None) -> Iterator[Tile]:
    """All tiles of a call."""
    q_len, kv_len = call.q.shape[2], call.k.shape[2]
    group = call.q.shape[1] // call.k.shape[1]
    block_q = BLOCK_Q if block_map is None else block_map.block_q
    rows = max(1, min(block_q, q_len, BLOCK_Q, max(16, _MOST_ROWS // group)))
    batches = 1 if block_map is None else block_map.batch
    heads = 1 if block_map is None else block_map.heads
    blocks = -(-q_len // block_q)
    for index, (b, h) in enumerate(itertools.product(range(batches), range(heads))):
        units, width = _units(call, rows, b if batches > 1 else None, h if heads > 1 else None)
        for block in range(blocks):
            runs = (
                [(0, kv_len, False)] if block_map is None else runs_of_row(block_map, index * blocks + block)
            )
            visited = chunks(runs, width)
            stop = min((block + 1) * block_q, q_len)
            for first in range(block * block_q, stop, rows):
                for unit in units:
                    yield Tile(unit, (first, min(first + rows, stop)), visited)


def _units(call: AttentionCall, rows: int, b: int | None, h: int | None) -> tuple[list[Unit], int]:
    """The units for a batch and head of the map (None: all share it), and how many columns fit."""
    batch, heads, kv_heads = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    group = heads // kv_heads
    batches = range(batch) if b is None else range(b, b + 1)
    if h is not None:
        together = max(1, _TILE_SCORES // (rows * _LEAST_WIDTH))
        kv = (h // group, h // group + 1)
        units = [Unit(part, (h, h + 1), kv) for part in _parts(batches, together)]
    else:
        together = max(1, _TILE_SCORES // (group * rows * _LEAST_WIDTH))
        units = [
            Unit(part, (kv[0] * group, kv[1] * group), kv)
            for part in _parts(batches, max(1, together // kv_heads))
            for kv in _parts(range(kv_heads), together)
        ]
    largest = max((math.prod(unit.shape) for unit in units), default=1)
    return units, min(max(_TILE_SCORES // (largest * rows), _LEAST_WIDTH), _MOST_WIDTH)


def _parts(items: range, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, items.stop)) for start in range(items.start, items.stop, size)]


def _attend(call: AttentionCall, tile: Tile, dtype: torch.dtype) -> _State:
    unit, rows = tile.unit, tile.rows
    batches, kv_heads, group = unit.shape
    count = rows[1] - rows[0]
    shape = (batches, kv_heads, group, count)
    q = unit.queries(call.q, rows).to(dtype).mul(call.scale).reshape(batches * kv_heads, group * count, -1)
    state = _start(call, unit, shape, dtype)
    inputs = _inputs(call, unit, rows)
    for chunk in tile.visited:
        scores = torch.bmm(q, unit.keys(call.k, chunk, dtype).transpose(1, 2))
        scores = _modify(call, scores.view(*shape, -1), inputs, chunk, dtype)
        may_hide = bool(chunk.masked) or call.score is not None
        values = unit.keys(call.v, chunk, dtype)
        _accumulate(state, scores.reshape(batches * kv_heads, group * count, -1), values, may_hide)
    return state


def _start(call: AttentionCall, unit: Unit, shape: tuple[int, int, int, int], dtype: torch.dtype) -> _State:
    """Rows that have seen no key; a sink is a key without a value, seen first."""
    rows = (shape[0] * shape[1], shape[2] * shape[3], 1)
    if call.sinks is None:
        maximum = call.q.new_full(rows, -math.inf, dtype=dtype)
        return _State(maximum, call.q.new_zeros(rows, dtype=dtype))
    sinks = call.sinks[slice(*unit.heads)].to(dtype).view(1, shape[1], shape[2], 1)
    return _State(sinks.expand(shape).reshape(rows), call.q.new_ones(rows, dtype=dtype))


def _inputs(call: AttentionCall, unit: Unit, rows: tuple[int, int]) -> dict[Input, torch.Tensor | int]:
    """What mods are called with, in shapes that broadcast over (batch, key head, group, row, column)."""
    batches, kv_heads, group = unit.shape
    return {
        Input.B: torch.arange(*unit.batch, dtype=torch.int32, device="cpu").view(batches, 1, 1, 1, 1),
        Input.H: torch.arange(*unit.heads, dtype=torch.int32, device="cpu").view(kv_heads, group, 1, 1),
        Input.Q_IDX: torch.arange(*rows, dtype=torch.int32, device="cpu").view(-1, 1),
        Input.Q_LEN: call.q.shape[2],
        Input.KV_LEN: call.k.shape[2],
    }


def _modify(
    call: AttentionCall,
    scores: torch.Tensor,
    inputs: dict[Input, torch.Tensor | int],
    chunk: Chunk,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Scores after the score_mod, -inf where the mask does not hold; may overwrite `scores`."""

    def value(root: Expr, more: dict[Input, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = evaluate(root, Env({**inputs, **more}, call.values, torch, dtype))
        return result

    if call.score is not None:
        modified = value(call.score, {Input.SCORE: scores, Input.KV_IDX: chunk.kv_idx})
        scores = modified if modified.shape == scores.shape else modified.expand(scores.shape).clone()
    if call.mask is not None:
        for segment in chunk.masked:
            visible = value(call.mask, {Input.KV_IDX: segment.kv_idx})
            scores[..., segment.low : segment.high].masked_fill_(~visible, -math.inf)
    return scores


def _accumulate(state: _State, scores: torch.Tensor, values: torch.Tensor, may_hide: bool) -> None:
    """One step of the online softmax; overwrites `scores`."""
    maximum = torch.maximum(state.maximum, scores.amax(-1, keepdim=True))
    # A row that has seen nothing yet: subtracting 0 in place of -inf gives exp(-inf) = 0, not NaN.
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    hidden = scores == -math.inf if may_hide and not values.sum().isfinite() else None
    weights = scores.sub_(shift).exp_()
    decay = (state.maximum - shift).exp_()
    state.total = state.total.mul_(decay).add_(weights.sum(-1, keepdim=True))
    state.maximum = maximum
    if hidden is not None:
        added = weigh_values(weights, values, ~hidden)
        state.output = added if state.output is None else state.output.mul_(decay).add_(added)
    elif state.output is None:
        state.output = torch.bmm(weights, values)
    else:
        state.output.mul_(decay).baddbmm_(weights, values)


def _store(state: _State, tile: Tile, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    target = tile.unit.queries(out, tile.rows)
    if state.output is None:
        target.zero_()
    else:
        total = state.total.masked_fill(state.total == 0.0, 1.0)
        target.copy_(state.output.div_(total).view(target.shape))
    if lse is not None:
        target = tile.unit.queries(lse, tile.rows)
        target.copy_((state.maximum + state.total.log()).view(target.shape))
