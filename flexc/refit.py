"""Block masks whose blocks no tile of a kernel divides: their blocks as a part of the mask.

A kernel's tiles have powers of two of at least 16 rows and columns, and lie inside the blocks of the map that
they walk. A map of other blocks is left out where the mask alone says as much, which then has a map of the
kernel's own tiles. Otherwise which blocks are listed is read as a captured tensor, by the mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexc.block_lists import dense_kinds, visited_blocks
from flexc.call import AttentionCall, Mods
from flexc.device_map import DeviceMap
from flexc.errors import BlockMaskMismatch
from flexc.ir.blockmap import BlockMap, TileKind
from flexc.ir.build import binary, const, input_, load, logic, scalar
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.ops import Input, Op
from flexc.ir.simplify import simplify
from flexc.ir.types import DType, Storage
from flexc.lru import LRU
from flexc.map_cache import effective_block_map
from flexc.provenance import is_of_the_mask

_LEAST_TILE = 16
_GOOD_TILE = 64
"""Blocks with a divisor of this size cost nothing; for smaller ones, a map of the mask alone is better."""
_LARGEST_TABLE = 2**28

_compared: LRU[tuple[int, int], tuple[BlockMap, BlockMap, bool]] = LRU(64)
_tables: LRU[tuple[int, torch.device], tuple[BlockMap, torch.Tensor]] = LRU(16)


def refitted(call: AttentionCall) -> AttentionCall:
    """The same call with a block map that tiles of a kernel divide, or with none.

    Raises:
        BlockMaskMismatch: the map says more than the mask, its blocks are no multiples of 16, and too many.
    """
    given = call.block_map
    if given is None or _divisor(given) >= _GOOD_TILE:
        return call
    if is_of_the_mask(call):
        return replace(call, block_map=None)
    if isinstance(given, DeviceMap):
        given = given.host()
        call = replace(call, block_map=given)
    if call.mask is not None and _says_no_more(given, call):
        return replace(call, block_map=None)
    return call if _divisor(given) >= _LEAST_TILE else _with_blocks_in_the_mask(call, given)


def _divisor(block_map: BlockMap | DeviceMap) -> int:
    """The largest power of two that divides both block sizes."""
    sizes = block_map.block_q | block_map.block_kv
    return sizes & -sizes


def _says_no_more(given: BlockMap, call: AttentionCall) -> bool:
    """Whether every block that the mask opens is listed: then the map takes nothing away."""
    own = effective_block_map(replace(call, block_map=None), given.block_q, given.block_kv)
    both = effective_block_map(call, given.block_q, given.block_kv)
    if own is None or both is None:
        return False
    key = (id(own), id(both))
    found = _compared.get(key)
    if found is None:
        planes = both.batch * both.heads // (own.batch * own.heads)
        found = (own, both, visited_blocks(both) == visited_blocks(own) * planes)
        _compared.put(key, found)  # holding the maps keeps their ids theirs
    return found[2]


def _with_blocks_in_the_mask(call: AttentionCall, given: BlockMap) -> AttentionCall:
    table = _table(given, call.q.device)
    slot = len(call.captures)
    listed = _listed(given, slot)
    mask = listed if call.mask is None else logic(Op.AND, call.mask, listed)
    mods = call.mods
    captures = (
        *mods.captures,
        Capture("listed_blocks", Storage.BOOL, 4),
        Capture("block_q", Storage.I32),
        Capture("block_kv", Storage.I32),
    )
    return replace(
        call,
        mods=Mods(mods.score, simplify(mask), captures, mods.sources, mods.graphs),
        values=(*call.values, table, given.block_q, given.block_kv),
        block_map=None,
    )


def _listed(given: BlockMap, slot: int) -> Expr:
    """Whether the block of a pair is listed, read from `slot`; the block sizes are in the next two."""
    zero = const(0)
    places = (
        input_(Input.B) if given.batch > 1 else zero,
        input_(Input.H) if given.heads > 1 else zero,
        binary(Op.FLOORDIV, input_(Input.Q_IDX), scalar(slot + 1, DType.I32)),
        binary(Op.FLOORDIV, input_(Input.KV_IDX), scalar(slot + 2, DType.I32)),
    )
    return load(slot, places, DType.BOOL)


def _table(given: BlockMap, device: torch.device) -> torch.Tensor:
    """Which blocks are listed: bool (batch, heads, q blocks, kv blocks), kept with the map."""
    size = given.grid.tiles
    if size > _LARGEST_TABLE:
        raise BlockMaskMismatch(
            f"the block mask has {size:,} blocks of ({given.block_q}, {given.block_kv}), which no tile of "
            f"{_LEAST_TILE} or more divides, and leaves out some that the mask would not",
            hint="use blocks that are multiples of 16, such as 128",
        )
    key = (id(given), device)
    found = _tables.get(key)
    if found is None:
        found = (given, torch.from_numpy(dense_kinds(given) != TileKind.EMPTY).to(device))
        _tables.put(key, found)  # holding the map keeps its id its own
    return found[1]
