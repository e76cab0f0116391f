"""Block-sparse attention on the CPU: tile by tile, online softmax, memory linear in the lengths.

The mask is evaluated in partial blocks only; empty blocks are not read.

The online softmax is that of M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexc.call import AttentionCall, Result
from flexc.cpu_tiles import BLOCK_KV, BLOCK_Q, Cut, Tile, computed_in, inputs_of, kept_of, modified
from flexc.exponential import exp_
from flexc.ir.blockmap import BlockMap
from flexc.map_cache import effective_block_map
from flexc.philox import survivors_weight
from flexc.weigh_values import weigh_values
from flexc.workers import run_each


@dataclass(slots=True)
class _State:
    """The online softmax of a tile: row maximum and sum (n, rows, 1), unnormalised output (n, rows, Dv)."""

    maximum: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor | None = None


@torch.no_grad()
def run(call: AttentionCall) -> Result:
    """Attention of the call in fp32 (fp64 for fp64 queries), rounded once to the dtype of q.

    Returns out (B, Hq, L, Dv) and lse (B, Hq, L), fp32 (fp64 for fp64 queries), or None where it is not asked
    for.
    """
    batch, heads, q_len, _ = call.q.shape
    dtype = computed_in(call)
    out = call.out
    if out is None:
        out = call.q.new_empty((batch, heads, q_len, call.v.shape[3]))
    lse = call.q.new_empty((batch, heads, q_len), dtype=dtype) if call.return_lse else None
    block_map = effective_block_map(call, BLOCK_Q, BLOCK_KV)

    def work(tile: Tile) -> None:
        _store(call, _attend(call, tile, dtype), tile, out, lse)

    with torch.autocast("cpu", enabled=False):
        run_each(work, _tiles(call, block_map))
    return out, lse


def _tiles(call: AttentionCall, block_map: BlockMap | None) -> Iterator[Tile]:
    cut = Cut(call, block_map)
    for plane in cut.planes():
        for block in range(cut.blocks):
            yield from cut.tiles(plane, block, plane.units)


def _attend(call: AttentionCall, tile: Tile, dtype: torch.dtype) -> _State:
    unit = tile.unit
    n, rows = tile.matrices
    q = unit.queries(call.q, tile.rows).to(dtype).mul(call.scale).reshape(n, rows, -1)
    state = _start(call, tile, dtype)
    inputs = inputs_of(call, tile)
    for chunk in tile.visited:
        scores = torch.bmm(q, unit.keys(call.k, chunk, dtype).transpose(1, 2))
        scores = modified(call, scores.view(*tile.shape, -1), inputs, chunk).reshape(n, rows, -1)
        keep = kept_of(call, tile, inputs, chunk)
        may_hide = bool(chunk.masked) or call.score is not None
        values = unit.keys(call.v, chunk, dtype)
        _accumulate(state, scores, values, may_hide, None if keep is None else keep.view(n, rows, -1))
    return state


def _start(call: AttentionCall, tile: Tile, dtype: torch.dtype) -> _State:
    """Rows that have seen no key; a sink is a key without a value, seen first."""
    rows = (*tile.matrices, 1)
    if call.sinks is None:
        maximum = call.q.new_full(rows, -math.inf, dtype=dtype)
        return _State(maximum, call.q.new_zeros(rows, dtype=dtype))
    shape = tile.shape
    sinks = call.sinks[slice(*tile.unit.heads)].to(dtype).view(1, shape[1], shape[2], 1)
    return _State(sinks.expand(shape).reshape(rows), call.q.new_ones(rows, dtype=dtype))


def _accumulate(
    state: _State, scores: torch.Tensor, values: torch.Tensor, may_hide: bool, keep: torch.Tensor | None
) -> None:
    """One step of the online softmax; overwrites `scores`. Dropped weights count in the sum, as PyTorch's."""
    maximum = torch.maximum(state.maximum, scores.amax(-1, keepdim=True))
    # A row that has seen nothing yet: subtracting 0 in place of -inf gives exp(-inf) = 0, not NaN.
    shift = maximum.masked_fill(maximum == -math.inf, 0.0)
    may_spoil = (may_hide or keep is not None) and not values.sum().isfinite()
    seen = scores != -math.inf if may_spoil else None
    weights = exp_(scores.sub_(shift))
    decay = (state.maximum - shift).exp_()
    state.total = state.total.mul_(decay).add_(weights.sum(-1, keepdim=True))
    state.maximum = maximum
    if keep is not None:
        weights.masked_fill_(~keep, 0.0)
    if seen is not None:
        added = weigh_values(weights, values, seen if keep is None else seen & keep)
        state.output = added if state.output is None else state.output.mul_(decay).add_(added)
    elif state.output is None:
        state.output = torch.bmm(weights, values)
    else:
        state.output.mul_(decay).baddbmm_(weights, values)


def _store(
    call: AttentionCall, state: _State, tile: Tile, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    target = tile.unit.queries(out, tile.rows)
    if state.output is None:
        target.zero_()
    else:
        total = state.total.masked_fill(state.total == 0.0, 1.0)
        result = state.output.div_(total)
        if call.dropout_p:
            result.mul_(survivors_weight(call.dropout_p))
        target.copy_(result.view(target.shape))
    if lse is not None:
        target = tile.unit.queries(lse, tile.rows)
        target.copy_((state.maximum + state.total.log()).view(target.shape))
