"""Choosing batches, heads and query blocks of a block mask by indices, as PyTorch does."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from flexc.block_lists import Array
from flexc.errors import BlockIndexOutOfRange, InvalidBlockMask
from flexc.ir.blockmap import BlockMap

Index: TypeAlias = int | slice | torch.Tensor
_DIMENSIONS = ("batches", "heads", "query blocks")


def rows_of(block_map: BlockMap) -> Array:
    """The number of each row of a map: (batch, heads, q blocks)."""
    shape = (block_map.batch, block_map.heads, block_map.q_blocks)
    return np.arange(block_map.batch * block_map.heads * block_map.q_blocks).reshape(shape)


def chosen_rows(block_map: BlockMap, shape: tuple[int, int], index: Index | tuple[Index, ...]) -> Array:
    """The rows of the map at an index of (B, H, q blocks); `shape` is (B, H). Every dimension stays.

    Raises:
        BlockIndexOutOfRange: an integer, or one of a tensor, is outside.
        InvalidBlockMask: more than three indices, more than one tensor, or something else.
    """
    given = index if isinstance(index, tuple) else (index,)
    if len(given) > len(_DIMENSIONS):
        raise InvalidBlockMask(f"a block mask takes at most 3 indices, not {len(given)}")
    rows = np.broadcast_to(rows_of(block_map), (*shape, block_map.q_blocks))
    key = tuple(_position(i, n, what) for i, n, what in zip(given, rows.shape, _DIMENSIONS, strict=False))
    if sum(isinstance(i, np.ndarray) for i in key) > 1:
        raise InvalidBlockMask("a block mask is indexed by at most one tensor", hint="index twice")
    chosen: Array = rows[key]
    return chosen


def _position(index: Index, length: int, what: str) -> Any:
    """An integer as a slice of one, a tensor as an array, both checked."""
    if isinstance(index, slice):
        return index
    if isinstance(index, int | np.integer) and not isinstance(index, bool):
        place = _checked(int(index), length, what)
        return slice(place, place + 1)
    if isinstance(index, torch.Tensor) and index.dim() <= 1 and not index.is_floating_point():
        places = np.atleast_1d(index.detach().cpu().numpy())
        if places.dtype == np.bool_:
            if len(places) != length:
                raise BlockIndexOutOfRange(f"a boolean index of length {len(places)} over {length} {what}")
            return np.flatnonzero(places)
        for place in (int(places.min(initial=0)), int(places.max(initial=0))) if places.size else ():
            _checked(place, length, what)
        return places
    raise InvalidBlockMask(
        f"a block mask is indexed by {index!r}"[:200], hint="use integers, slices and at most one 1-d tensor"
    )


def _checked(place: int, length: int, what: str) -> int:
    """The place counted from the start."""
    if not -length <= place < length:
        raise BlockIndexOutOfRange(
            f"index {place} into the {length} {what} of a block mask",
            hint=f"indices go from {-length} to {length - 1}",
        )
    return place % length
