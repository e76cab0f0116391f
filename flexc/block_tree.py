"""Block masks as nodes of PyTorch's trees: `tree_map` over a batch reaches the tensors of a mask.

The leaves are the run-length map, not PyTorch's lists, which are as wide as the mask has blocks. What
`mask_mod` captured is no leaf, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from flexc.block_listing import BlockListing
from flexc.device_map import DeviceMap
from flexc.ir.blockmap import BlockMap
from flexc.ir.runs import TileGrid
from flexc.mask_functions import MaskFunction

_LEAVES = ("offsets", "tiles", "dq_write_order", "dq_write_order_full", "dq_kv_order")


class _Context(NamedTuple):
    """What is no tensor. Equal for masks of one function, form and lengths."""

    shape: tuple[int, int]
    grid: TileGrid
    is_on_device: bool  # the map is made of stretches, else of runs
    seq_lengths: tuple[int, int]
    mask_mod: MaskFunction
    separate_full: bool
    has_q: bool
    dq_kv_order_spt: bool | None


def register(kind: type[BlockListing]) -> None:
    """Makes a class of block masks known to `torch.utils._pytree`."""
    pytree.register_pytree_node(
        kind,
        _flatten,
        lambda leaves, context: _unflatten(kind, leaves, context),
        serialized_type_name=f"flexc.{kind.__name__}",
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten(mask: BlockListing) -> tuple[list[Any], _Context]:
    """The tensors of a block mask on its device, and the rest; an order that the mask lacks is None."""
    held = mask._source
    if isinstance(held, DeviceMap):
        held = held.ready_here()
        arrays = [held.offsets, held.stretches]
    else:
        arrays = [_as_tensor(x, mask.device) for x in (held.offsets, held.runs)]
    context = _Context(
        mask._shape,
        held.grid,
        isinstance(held, DeviceMap),
        mask.seq_lengths,
        mask.mask_mod,
        mask._separate_full,
        mask._has_q,
        mask.dq_kv_order_spt,
    )
    return [*arrays, *mask._write_orders, mask.dq_kv_order], context


def _as_tensor(x: Any, device: torch.device) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)).to(device) if isinstance(x, np.ndarray) else x


def _flatten_with_keys(mask: BlockListing) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(mask)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(_LEAVES, leaves, strict=True)], context


def _unflatten(kind: type[BlockListing], leaves: Iterable[Any], context: _Context) -> BlockListing:
    """The block mask of leaves, on the device where they are now.

    Leaves that are no tensors with values, as those of a trace, are only held, to be flattened again.
    """
    offsets, tiles, *orders = leaves
    device = offsets.device if isinstance(offsets, torch.Tensor) else torch.device("cpu")
    mask = kind.__new__(kind)
    BlockListing.__init__(
        mask, _map_of(offsets, tiles, device, context), context.shape, context.mask_mod, device
    )
    mask.seq_lengths = context.seq_lengths
    mask._separate_full, mask._has_q = context.separate_full, context.has_q
    mask._write_orders = (orders[0], orders[1])
    mask.dq_kv_order, mask.dq_kv_order_spt = orders[2], context.dq_kv_order_spt
    return mask


def _map_of(offsets: Any, tiles: Any, device: torch.device, context: _Context) -> BlockMap | DeviceMap:
    grid = context.grid
    if context.is_on_device:
        return DeviceMap(grid, offsets, tiles)
    if type(offsets) is type(tiles) is torch.Tensor and device.type != "meta":
        offsets, tiles = offsets.cpu().numpy(), tiles.cpu().numpy()
    sizes = (grid.q_len, grid.kv_len, grid.block_q, grid.block_kv, grid.batch, grid.heads)
    return BlockMap(*sizes, offsets, tiles)
