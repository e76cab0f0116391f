"""Block maps as tensors, which an operator can take, and back."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexc.block_lists import BlockLists, from_lists
from flexc.device_map import DeviceMap, Map
from flexc.ir.blockmap import BlockMap
from flexc.ir.runs import TileGrid
from flexc.lru import LRU
from flexc.statement import MapShape

# A map that went through an operator is the same object after it: what is kept of a map (its copy on a GPU,
# its meet with another) is found by identity. The tensors are held, so no other tensor has their addresses.
_maps: LRU[tuple[object, ...], tuple[tuple[torch.Tensor, ...], Map]] = LRU(64)


def tensors_of(block_map: Map) -> list[torch.Tensor]:
    """The offsets of a map and its runs or stretches, int32, sharing its memory."""
    tensors = arrays_of(block_map)
    _maps.put(
        _key(tensors, shape_of(block_map), block_map.q_len, block_map.kv_len), (tuple(tensors), block_map)
    )
    return tensors


def arrays_of(block_map: Map) -> list[torch.Tensor]:
    """The same, without remembering whose they are."""
    if isinstance(block_map, DeviceMap):
        return [block_map.offsets, block_map.stretches]
    return [torch.from_numpy(block_map.offsets), torch.from_numpy(block_map.runs)]


def shape_of(block_map: Map) -> MapShape:
    """What is static of a map."""
    form = "stretches" if isinstance(block_map, DeviceMap) else "runs"
    return MapShape(block_map.block_q, block_map.block_kv, block_map.batch > 1, block_map.heads > 1, form)


def map_of(blocks: list[torch.Tensor], shape: MapShape, q: torch.Tensor, k: torch.Tensor) -> Map:
    """The map of these tensors for attention of q over k."""
    q_len, kv_len = q.shape[2], k.shape[2]
    key = _key(blocks, shape, q_len, kv_len)
    found = _maps.get(key)
    if found is None:
        batch, heads = q.shape[0] if shape.by_batch else 1, q.shape[1] if shape.by_head else 1
        grid = TileGrid(q_len, kv_len, shape.block_q, shape.block_kv, batch, heads)
        found = (tuple(blocks), _made(blocks, shape.form, grid))
        _maps.put(key, found)
    return found[1]


def _made(blocks: list[torch.Tensor], form: str, grid: TileGrid) -> Map:
    if form == "stretches":
        return DeviceMap(grid, blocks[0], blocks[1])
    if form == "lists":
        full = BlockLists(blocks[2], blocks[3]) if len(blocks) == 4 else None
        return from_lists(BlockLists(blocks[0], blocks[1]), full, replace(grid, batch=1, heads=1))
    offsets, runs = (x.cpu().numpy() for x in blocks)
    return BlockMap.on(grid, offsets, runs)


def _key(blocks: list[torch.Tensor], shape: MapShape, q_len: int, kv_len: int) -> tuple[object, ...]:
    places = ((x.data_ptr(), x.shape, 0 if x.is_inference() else x._version, x.device) for x in blocks)
    return (*places, shape, q_len, kv_len)
