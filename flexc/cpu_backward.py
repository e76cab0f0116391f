"""Gradients of block-sparse attention on the CPU: tile by tile as the forward, in linear memory.

A tile computes its scores again, and from them and the forward's lse its probabilities P. With dO the
gradient of the output and dlse that of the lse (T. Dao et al., "FlashAttention", 2022, appendix B):

    dP = dO V^T         delta = rowsum(P * dP) - dlse           dS = P * (dP - delta)
    dV = P^T dO         dsink = -sum P_sink * delta

The adjoint of the score_mod maps dS, the gradient of the modified scores, to dT, that of the plain ones, and
to those of captured tensors; dQ = scale * dT K, dK = scale * dT^T Q. Dropout keeps the pairs that it kept in
the forward: its factor stands before P in dV, and before dP in dS.

dQ belongs to a tile. Tiles that add to the same keys are one lane, worked through in order; where there are
fewer key heads than threads, a few lanes share them, each with sums of its own. So gradients are the same
bits from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexc.call import AttentionCall, Gradients
from flexc.chunks import Chunk
from flexc.cpu_captured import Captured, Lane, add_scattered
from flexc.cpu_tiles import (
    BLOCK_KV,
    BLOCK_Q,
    Cut,
    Inputs,
    Plane,
    Tile,
    Unit,
    computed_in,
    inputs_of,
    kept_of,
    modified,
    values_of,
)
from flexc.exponential import exp_
from flexc.ir.adjoint import Adjoint, adjoint
from flexc.ir.build import input_
from flexc.ir.ops import Input
from flexc.map_cache import effective_block_map
from flexc.philox import survivors_weight
from flexc.weigh_values import weigh_values
from flexc.workers import run_each

Wanted = frozenset[str | int]
# Pairs of a tile that are kept between its two passes: 32 MB of fp32 a thread, beside the row's own.
_KEPT_SCORES = 1 << 21
_PLAIN = Adjoint(input_(Input.GRAD), ())


@torch.no_grad()
def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The gradients of a call, computed in fp32 (fp64 for fp64 queries), each rounded once to its dtype.

    Args:
        call: what the forward computed.
        out: its output (B, Hq, L, Dv); nothing is computed from it, see `_Work`.
        lse: its lse (B, Hq, L).
        grad_out: the gradient of `out`.
        grad_lse: the gradient of `lse`, or None.
        wanted: "q", "k", "v", "sinks", and slots of captured floating tensors.
    """
    block_map = effective_block_map(call, BLOCK_Q, BLOCK_KV)
    cut = Cut(call, block_map)
    planes = list(cut.planes())
    work = _Work(call, cut, planes, lse, grad_out, grad_lse, wanted)
    with torch.autocast("cpu", enabled=False):
        run_each(work.run_group, work.groups())
    return work.gradients()


@dataclass(slots=True)
class _Rows:
    """What all chunks of a tile share: (n, rows, ...) matrices in the dtype of the computation."""

    q: torch.Tensor  # scaled
    grad_out: torch.Tensor
    shift: torch.Tensor
    finite: bool


@dataclass(slots=True)
class _Pairs:
    """A chunk of a tile, (n, rows, columns).

    `plain` scores; `weights` P, and `grads` dP, with the factor of dropout; `hidden` pairs, None where the
    mask hides none; `dropped` pairs; `exact` are the pairs that take part, where an operand is NaN or
    infinite: a weight of zero then hides nothing, and products are taken pair by pair.
    """

    k: torch.Tensor
    plain: torch.Tensor
    weights: torch.Tensor
    grads: torch.Tensor
    hidden: torch.Tensor | None
    dropped: torch.Tensor | None
    exact: torch.Tensor | None


_Group = tuple[list[Lane], dict[int, torch.Tensor]]


class _Work:
    """A backward in progress.

    delta is summed from P and dP rather than from the output, whose rounding would be felt.
    """

    def __init__(
        self,
        call: AttentionCall,
        cut: Cut,
        planes: list[Plane],
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wanted: Wanted,
    ) -> None:
        self.call, self.cut, self.planes = call, cut, planes
        self.lse, self.grad_out, self.grad_lse = lse, grad_out, grad_lse
        self.wanted = wanted
        self.dtype = computed_in(call)
        slots = frozenset(slot for slot in wanted if isinstance(slot, int))
        self.adjoint = _PLAIN if call.score is None else adjoint(call.score, slots)
        owners = self._owners()
        threads = torch.get_num_threads()
        self.parts = 1 if len(owners) >= threads else -(-2 * threads // max(1, len(owners)))
        self.parts = max(1, min(self.parts, cut.blocks))
        self.lanes = [Lane(units, part) for units in owners for part in range(self.parts)]
        tensors = {slot: x for slot in slots if isinstance(x := call.values[slot], torch.Tensor)}
        self._most_groups = 2 * threads
        self.captured = Captured(tensors, self.adjoint.scatters, self._most_groups)
        self.grad_q = torch.empty_like(call.q) if "q" in wanted else None
        self.grad_k = self._sums(call.k) if "k" in wanted else None
        self.grad_v = self._sums(call.v) if "v" in wanted else None
        self.of_sinks = lse.new_zeros(lse.shape, dtype=self.dtype) if "sinks" in wanted else None

    def _owners(self) -> list[tuple[tuple[int, Unit], ...]]:
        """The units that add to the same keys, together, with the indices of their planes."""
        owners: dict[object, list[tuple[int, Unit]]] = {}
        for plane in self.planes:
            for unit in plane.units:
                owners.setdefault((unit.batch, unit.kv_heads), []).append((plane.index, unit))
        return [tuple(units) for units in owners.values()]

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros to add gradients of keys or values to, (parts, B, Hkv, S, D)."""
        return torch.zeros((self.parts, *x.shape), dtype=self.dtype, device="cpu")

    def groups(self) -> list[_Group]:
        """Lanes that one thread works through in order, with their sums for captured tensors."""
        together: dict[tuple[object, ...], list[Lane]] = {}
        for lane in self.lanes:
            together.setdefault(self.captured.apart(lane), []).append(lane)
        groups: list[list[Lane]] = [[] for _ in range(min(self._most_groups, len(together)))]
        for i, lanes in enumerate(together.values()):
            groups[i % len(groups)] += lanes
        return [(lanes, self.captured.group()) for lanes in groups]

    def run_group(self, group: _Group) -> None:
        lanes, sums = group
        for lane in lanes:
            for tile in self._tiles(lane):
                self._run_tile(tile, lane.part, sums)

    def _tiles(self, lane: Lane) -> Iterator[Tile]:
        for index, unit in lane.units:
            for block in range(lane.part, self.cut.blocks, self.parts):
                yield from self.cut.tiles(self.planes[index], block, [unit])

    def _run_tile(self, tile: Tile, part: int, sums: dict[int, torch.Tensor]) -> None:
        """Two passes over the chunks: sums of the rows, then everything.

        The sums could be had from the forward's output and lse, but these are rounded, and the error would be
        the same for a whole row. Chunks are kept from pass to pass where they are few.
        """
        rows = self._start(tile)
        inputs = inputs_of(self.call, tile)
        columns = sum(len(chunk.kv_idx) for chunk in tile.visited)
        keeps = math.prod(tile.matrices) * columns <= _KEPT_SCORES
        total, delta = self._of_sink(tile, rows), torch.zeros_like(rows.shift)
        kept_pairs: list[_Pairs] = []
        for chunk in tile.visited:
            pairs = self._pairs(tile, rows, inputs, chunk)
            total += pairs.weights.sum(-1, keepdim=True)
            delta += (pairs.weights * pairs.grads).sum(-1, keepdim=True)
            if keeps:
                kept_pairs.append(pairs)
        share = total.masked_fill(total == 0.0, 1.0).reciprocal_()
        delta *= share
        if self.grad_lse is not None:
            delta -= self._matrix(tile, self.grad_lse)
        if self.of_sinks is not None:
            target = tile.unit.queries(self.of_sinks, tile.rows)
            target.copy_((self._of_sink(tile, rows) * share * delta).view(target.shape))
        grad_q = torch.zeros_like(rows.q)
        for i, chunk in enumerate(tile.visited):
            pairs = kept_pairs[i] if keeps else self._pairs(tile, rows, inputs, chunk)
            grad_q += self._run_chunk(tile, rows, inputs, chunk, pairs, share, delta, part, sums)
        if self.grad_q is not None:
            target = tile.unit.queries(self.grad_q, tile.rows)
            target.copy_(grad_q.mul_(self.call.scale).view(target.shape))

    def _matrix(self, tile: Tile, x: torch.Tensor) -> torch.Tensor:
        """A tile's rows of something of queries (B, Hq, L, ...), as (n, rows, ...)."""
        return tile.unit.queries(x, tile.rows).to(self.dtype).reshape(*tile.matrices, -1)

    def _start(self, tile: Tile) -> _Rows:
        q = self._matrix(tile, self.call.q) * self.call.scale
        grad_out, lse = self._matrix(tile, self.grad_out), self._matrix(tile, self.lse)
        shift = lse.masked_fill(lse == -math.inf, 0.0)  # a row without keys: exp(-inf - 0) is 0
        sums = q.sum() + grad_out.sum() + shift.sum()
        if self.grad_lse is not None:
            sums = sums + self._matrix(tile, self.grad_lse).sum()
        return _Rows(q, grad_out, shift, bool(sums.isfinite()))

    def _of_sink(self, tile: Tile, rows: _Rows) -> torch.Tensor:
        """The sinks' share of the rows, before it is normalised: zeros without sinks."""
        sinks = self.call.sinks
        if sinks is None:
            return torch.zeros_like(rows.shift)
        shape = tile.shape
        logits = sinks[slice(*tile.unit.heads)].to(self.dtype).view(1, shape[1], shape[2], 1)
        return (logits.expand(shape).reshape(rows.shift.shape) - rows.shift).exp_()

    def _pairs(self, tile: Tile, rows: _Rows, inputs: Inputs, chunk: Chunk) -> _Pairs:
        call, unit = self.call, tile.unit
        k, v = unit.keys(call.k, chunk, self.dtype), unit.keys(call.v, chunk, self.dtype)
        plain = torch.bmm(rows.q, k.transpose(1, 2))
        scores = modified(call, plain.view(*tile.shape, -1), inputs, chunk).reshape(plain.shape)
        hidden = scores == -math.inf if chunk.masked or call.score is not None else None
        exact = None
        if not (rows.finite and bool((k.sum() + v.sum()).isfinite())):
            exact = scores != -math.inf
        weights = exp_(scores.sub_(rows.shift))
        grads = torch.bmm(rows.grad_out, v.transpose(1, 2))
        if exact is not None:
            weights.masked_fill_(~exact, 0.0)
            grads.masked_fill_(~exact, 0.0)
        keep = kept_of(call, tile, inputs, chunk)
        dropped = None if keep is None else ~keep.view(plain.shape)
        if dropped is not None:
            grads.mul_(survivors_weight(call.dropout_p)).masked_fill_(dropped, 0.0)
        return _Pairs(k, plain, weights, grads, hidden, dropped, exact)

    def _run_chunk(
        self,
        tile: Tile,
        rows: _Rows,
        inputs: Inputs,
        chunk: Chunk,
        pairs: _Pairs,
        share: torch.Tensor,
        delta: torch.Tensor,
        part: int,
        sums: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Adds what a chunk gives to all gradients but that of q, and returns that (times the scale)."""
        weights, exact = pairs.weights.mul_(share), pairs.exact
        grads = pairs.grads.sub_(delta).mul_(weights)
        if exact is not None:
            weights.masked_fill_(~exact, 0.0)
            grads.masked_fill_(~exact, 0.0)
        grads = self._through_score(tile, inputs, chunk, pairs.plain, grads, pairs.hidden, sums)
        if self.grad_k is not None:
            _add(self.grad_k[part], tile, chunk, grads, rows.q, exact)
        if self.grad_v is not None:
            seen = exact
            if pairs.dropped is not None:
                weights.mul_(survivors_weight(self.call.dropout_p)).masked_fill_(pairs.dropped, 0.0)
                seen = None if exact is None else exact & ~pairs.dropped
            _add(self.grad_v[part], tile, chunk, weights, rows.grad_out, seen)
        return torch.bmm(grads, pairs.k) if exact is None else weigh_values(grads, pairs.k, exact)

    def _through_score(
        self,
        tile: Tile,
        inputs: Inputs,
        chunk: Chunk,
        plain: torch.Tensor,
        grads: torch.Tensor,
        hidden: torch.Tensor | None,
        sums: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """From gradients of modified scores to those of the plain ones; adds those of captured tensors."""
        found = self.adjoint
        if found == _PLAIN:
            return grads
        shape = (*tile.shape, grads.shape[-1])
        more: Inputs = {
            Input.SCORE: plain.view(shape),
            Input.GRAD: grads.view(shape),
            Input.KV_IDX: chunk.kv_idx,
        }
        roots = [found.score_grad]
        for scatter in found.scatters:
            roots += [scatter.value, *scatter.indices]
        results = iter(values_of(self.call, tuple(roots), inputs, more))

        def visible(x: torch.Tensor) -> torch.Tensor:
            x = x.expand(shape)
            return x if hidden is None else x.masked_fill(hidden.view(shape), 0.0)

        of_score = next(results)
        for scatter in found.scatters:
            values = visible(next(results))
            indices = [next(results) for _ in scatter.indices]
            like = self.call.values[scatter.slot]
            assert isinstance(like, torch.Tensor)
            add_scattered(sums[scatter.slot], like, scatter, indices, values)
        if found.score_grad is _PLAIN.score_grad:
            return grads
        return visible(of_score).reshape(grads.shape)

    def gradients(self) -> Gradients:
        """All that was wanted, in the dtypes of what they are the gradients of."""
        call = self.call
        return Gradients(
            q=self.grad_q,
            k=_total(self.grad_k, call.k),
            v=_total(self.grad_v, call.v),
            sinks=self._of_sinks(),
            values=tuple(self.captured.result(slot) for slot in range(len(call.values))),
        )

    def _of_sinks(self) -> torch.Tensor | None:
        sinks = self.call.sinks
        if sinks is None or self.of_sinks is None:
            return None
        return self.of_sinks.sum((0, 2), dtype=torch.float64).neg().to(sinks.dtype)


def _add(
    sums: torch.Tensor,
    tile: Tile,
    chunk: Chunk,
    a: torch.Tensor,
    b: torch.Tensor,
    seen: torch.Tensor | None,
) -> None:
    """Add `a^T b` to the columns of a chunk in sums (B, Hkv, S, D); only pairs in `seen` take part."""
    unit = tile.unit
    own = sums[slice(*unit.batch), slice(*unit.kv_heads)].flatten(0, 1)
    a = a.transpose(1, 2)
    if seen is None and chunk.start is not None:
        own.narrow(1, chunk.start, len(chunk.kv_idx)).baddbmm_(a, b)
        return
    part = torch.bmm(a, b) if seen is None else weigh_values(a, b, seen.transpose(1, 2))
    own.index_add_(1, chunk.kv_idx, part)


def _total(sums: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """The parts' sums added in order, as the gradient of `like`."""
    if sums is None:
        return None
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total.to(like.dtype)
