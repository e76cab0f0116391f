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
from flexc.ir.blockmap import BlockMap
from flexc.mask_functions import MaskFunction

_LEAVES = ("offsets", "runs", "dq_write_order", "dq_write_order_full", "dq_kv_order")


class _Context(NamedTuple):
    """What is no tensor. Equal for masks of one function, form and lengths."""

    shape: tuple[int, int]
    map_shape: tuple[int, int, int, int, int, int]  # lengths, block sizes, batches and heads of the map
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
    held = mask._map
    arrays = (_as_tensor(x, mask.device) for x in (held.offsets, held.runs))
    map_shape = (held.q_len, held.kv_len, held.block_q, held.block_kv, held.batch, held.heads)
    context = _Context(
        mask._shape,
        map_shape,
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
    offsets, runs, *orders = leaves
    device = offsets.device if isinstance(offsets, torch.Tensor) else torch.device("cpu")
    if type(offsets) is type(runs) is torch.Tensor and device.type != "meta":
        offsets, runs = offsets.cpu().numpy(), runs.cpu().numpy()
    mask = kind.__new__(kind)
    block_map = BlockMap(*context.map_shape, offsets, runs)
    BlockListing.__init__(mask, block_map, context.shape, context.mask_mod, device)
    mask.seq_lengths = context.seq_lengths
    mask._separate_full, mask._has_q = context.separate_full, context.has_q
    mask._write_orders = (orders[0], orders[1])
    mask.dq_kv_order, mask.dq_kv_order_spt = orders[2], context.dq_kv_order_spt
    return mask
