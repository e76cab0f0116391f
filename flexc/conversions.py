"""PyTorch's block masks made into flexc's once, not in every call: reading the lists waits for a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import NotAMod
from flexc.mask_functions import sliced_mask_mod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from flexc.block_mask import BlockMask


@dataclass(frozen=True, slots=True)
class _Converted:
    """PyTorch's mask, what it held when it was converted, and the result."""

    source: weakref.ref[Any]
    lists: tuple[torch.Tensor | None, ...]
    state: tuple[object, ...]
    result: BlockMask


_conversions: dict[int, _Converted] = {}  # by the id of PyTorch's mask; an entry goes when the mask dies


def converted(block_mask: object, convert: Callable[[TorchBlockMask], BlockMask]) -> BlockMask:
    """`convert(block_mask)`, or the earlier result for the same mask if nothing in it has changed.

    Raises:
        NotAMod: it is no block mask of PyTorch.
        SlicedBlockMask: it was sliced, and its mask_mod not set since.
    """
    from torch.nn.attention import flex_attention

    if not isinstance(block_mask, flex_attention.BlockMask):
        raise NotAMod(
            f"block_mask is of type {type(block_mask).__name__}",
            hint="make one with flexc.create_block_mask(...)",
        )
    if block_mask.mask_mod is getattr(flex_attention, "_sliced_mask_mod_error", None):
        sliced_mask_mod(None, None, None, None)
    key = id(block_mask)
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    versions = tuple(0 if x is None or x.is_inference() else x._version for x in lists)
    state = (block_mask.seq_lengths, block_mask.BLOCK_SIZE, block_mask.mask_mod, versions)
    found = _conversions.get(key)
    if (
        found is not None
        and found.source() is block_mask
        and found.state == state
        and all(a is b for a, b in zip(found.lists, lists, strict=True))
    ):
        return found.result
    source = weakref.ref(block_mask, lambda _: _conversions.pop(key, None))
    result = convert(block_mask)
    _conversions[key] = _Converted(source, lists, state, result)
    return result
