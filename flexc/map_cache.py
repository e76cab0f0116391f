"""Block maps of masks, found once and kept as long as what they were found from is unchanged.

A map is found again when the graph, a captured number, a captured tensor (another object, or the same one
written in place), a length or a block size differs. Writes that autograd can't see either (through `.data` or
a shared numpy array) are not noticed.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flexc.call import AttentionCall
from flexc.device_map import DeviceMap, on_host
from flexc.frontend.value import Value
from flexc.ir.blockmap import BlockMap, build_block_map
from flexc.ir.expr import Expr, inputs_of, topological
from flexc.ir.graph import Capture
from flexc.ir.ledger import DEFAULT_BUDGET
from flexc.ir.ops import Input, Op
from flexc.ir.runs import TileGrid
from flexc.lru import LRU


@dataclass(frozen=True, slots=True)
class _Found:
    """A map, and the tensors that its key names by identity: dead ones make the key meaningless."""

    block_map: BlockMap
    tensors: tuple[weakref.ref[torch.Tensor], ...]

    def is_current(self) -> bool:
        return all(reference() is not None for reference in self.tensors)


_found: LRU[tuple[object, ...], _Found] = LRU(64)
_transposed: LRU[int, tuple[BlockMap, BlockMap]] = LRU(64)
_met: LRU[tuple[int, int], tuple[BlockMap, BlockMap, BlockMap]] = LRU(64)


def block_map_for(
    mask: Expr,
    values: Sequence[Value],
    *,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    block_q: int,
    block_kv: int,
    budget: float = DEFAULT_BUDGET,
) -> BlockMap:
    """The block map of a mask graph over the captured `values` (by slot), from the cache or newly found.

    The map has one batch (head) where the mask does not read `b` (`h`). `budget`: see `create_block_mask`.

    Raises:
        MaskTooOpen: a new map takes more than `budget` evaluations.
    """
    reads, slots = _reads(mask)
    batch = batch if Input.B in reads else 1
    heads = heads if Input.H in reads else 1
    arrays = _Arrays(values)
    key = (mask, q_len, kv_len, batch, heads, block_q, block_kv, *(arrays.key(slot) for slot in slots))
    found = _found.get(key)
    if found is not None and found.is_current():
        return found.block_map
    block_map = build_block_map(
        mask,
        [arrays.array(slot) if slot in slots else None for slot in range(len(values))],
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        block_q=block_q,
        block_kv=block_kv,
        budget=budget,
    )
    tensors = (values[slot] for slot in slots)
    _found.put(key, _Found(block_map, tuple(weakref.ref(t) for t in tensors if isinstance(t, torch.Tensor))))
    return block_map


def blocks_of(
    mask: Expr,
    captures: tuple[Capture, ...],
    values: Sequence[Value],
    grid: TileGrid,
    device: torch.device,
    budget: float,
) -> BlockMap | DeviceMap:
    """The map of a simplified mask: on a GPU that has the captured tensors, or else on the host.

    Raises:
        MaskTooOpen: the budget does not suffice.
    """
    if device.type == "cuda":
        from flexc.device_map_cache import device_map_for

        index = torch.cuda.current_device() if device.index is None else device.index
        found = device_map_for(mask, captures, values, grid, torch.device("cuda", index), budget)
        if found is not None:
            return found
    sizes = {f.name: getattr(grid, f.name) for f in fields(grid)}
    return block_map_for(mask, values, **sizes, budget=budget)


def effective_block_map(call: AttentionCall, block_q: int, block_kv: int) -> BlockMap | None:
    """Which tiles a call visits: the user's map, where there is one, met with the blocks of the mask.

    The block sizes are the user's map's, else those given. None: there is neither map nor mask, every tile is
    full.
    """
    given = None if call.block_map is None else on_host(call.block_map)
    if call.mask is None:
        return given
    if given is not None:
        block_q, block_kv = given.block_q, given.block_kv
    own = block_map_for(
        call.mask,
        call.values,
        q_len=call.q.shape[2],
        kv_len=call.k.shape[2],
        batch=call.q.shape[0],
        heads=call.q.shape[1],
        block_q=block_q,
        block_kv=block_kv,
    )
    return own if given is None or given is own else _meet(given, own)


def transposed(block_map: BlockMap) -> BlockMap:
    """The map with keys as rows, made once."""
    found = _transposed.get(id(block_map))
    if found is None:
        found = (block_map, block_map.transpose())  # holding the map keeps its id its own
        _transposed.put(id(block_map), found)
    return found[1]


def _meet(a: BlockMap, b: BlockMap) -> BlockMap:
    key = (id(a), id(b))
    found = _met.get(key)
    if found is None:
        found = (a, b, a.intersect(b))  # holding a and b keeps their ids theirs
        _met.put(key, found)
    return found[2]


@lru_cache(maxsize=1024)
def _reads(mask: Expr) -> tuple[frozenset[Input], tuple[int, ...]]:
    """The inputs that a graph reads, and the slots of the captures, ascending."""
    slots: set[int] = set()
    for node in topological(mask):
        if node.op in (Op.SCALAR, Op.LOAD) and isinstance(node.attr, int):
            slots.add(node.attr)
        elif node.op is Op.SIZE and isinstance(node.attr, tuple):
            slots.add(node.attr[0])
    return inputs_of(mask), tuple(sorted(slots))


class _Arrays:
    """Captured values as numpy arrays, copied from their device at most once."""

    def __init__(self, values: Sequence[Value]) -> None:
        self._values = values
        self._copies: dict[int, Any] = {}

    def array(self, slot: int) -> Any:
        """The value as numpy; 16-bit and 8-bit floats are widened to 32 bits."""
        value = self._values[slot]
        if not isinstance(value, torch.Tensor):
            return value
        if slot not in self._copies:
            value = value.detach()
            if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
                value = value.float()
            self._copies[slot] = value.cpu().numpy()
        return self._copies[slot]

    def key(self, slot: int) -> object:
        """Equal keys mean equal values, as long as the tensors that they name are alive."""
        value = self._values[slot]
        if not isinstance(value, torch.Tensor):
            return type(value), value
        if value.is_inference():  # it has no version counter: what it holds is its identity
            content = np.ascontiguousarray(self.array(slot))
            return value.dtype, content.shape, hashlib.blake2b(content.tobytes()).digest()
        return id(value), value._version
