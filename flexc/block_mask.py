"""Block masks: which blocks of pairs attention has to visit, with the interface of PyTorch's BlockMask."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from flexc.block_index import Index, chosen_rows, rows_of
from flexc.block_listing import BlockListing
from flexc.block_lists import BlockLists, block_sizes, from_lists, select_rows
from flexc.block_tree import register
from flexc.conversions import converted
from flexc.device_map import DeviceMap
from flexc.errors import BlockMaskMismatch, InvalidBlockMask, UnsupportedFeature
from flexc.ir.blockmap import BlockMap
from flexc.ir.ledger import DEFAULT_BUDGET
from flexc.ir.runs import TileGrid
from flexc.ir.schedule import Schedule, schedule
from flexc.mask_functions import (
    DeviceLike,
    MaskFunction,
    and_masks,
    create_mask,
    default_device,
    noop_mask,
    or_masks,
    sliced_mask_mod,
)
from flexc.provenance import remember

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

__all__ = [
    "BlockMask",
    "and_masks",
    "as_block_mask",
    "create_block_mask",
    "create_mask",
    "noop_mask",
    "or_masks",
]

DEFAULT_BLOCK_SIZE = 128
# PyTorch's flex_attention makes a mask of one such block where the user gives none.
ONE_BLOCK = 1 << 30


class BlockMask(BlockListing):
    """Which blocks of (query, key) pairs may hold a pair that attends, and which hold nothing else.

    Attributes and methods are those of `torch.nn.attention.flex_attention.BlockMask`, and so are their
    values. Within is a run-length map, whose size follows the number of runs; PyTorch's lists, as wide as the
    mask has kv blocks, are made when they are asked for: `kv_num_blocks` (B, H, q blocks), `kv_indices` (B,
    H, q blocks, kv blocks), the same for `full_kv_...`, and transposed for `q_...` and `full_q_...`; all
    int32.

    `mask_mod` and `seq_lengths` may be assigned, as is done after slicing. `mask_mod` applies in the blocks
    that are not full, and must hold in all of a full one.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None,
        full_kv_indices: torch.Tensor | None,
        q_num_blocks: torch.Tensor | None = None,
        q_indices: torch.Tensor | None = None,
        full_q_num_blocks: torch.Tensor | None = None,
        full_q_indices: torch.Tensor | None = None,
        BLOCK_SIZE: tuple[int, int] = (DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE),
        mask_mod: MaskFunction = noop_mask,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        """From PyTorch's lists. The lists by query block are made anew; they only say that they are wanted.

        Raises:
            InvalidBlockMask: lists, lengths or block sizes that do not fit each other.
        """
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise InvalidBlockMask("of full_kv_num_blocks and full_kv_indices, one is None", hint="pass both")
        full = None
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            full = BlockLists(full_kv_num_blocks, full_kv_indices)
        extent = TileGrid(*seq_lengths, *block_sizes(BLOCK_SIZE), 1, 1)
        block_map = from_lists(BlockLists(kv_num_blocks, kv_indices), full, extent)
        super().__init__(block_map, (block_map.batch, block_map.heads), mask_mod, kv_indices.device)
        self._separate_full = full is not None
        self._has_q = q_num_blocks is not None
        self._write_orders = (dq_write_order, dq_write_order_full)
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

    @classmethod
    def from_map(
        cls,
        block_map: BlockMap | DeviceMap,
        mask_mod: MaskFunction = noop_mask,
        *,
        shape: tuple[int, int] | None = None,
        device: DeviceLike = "cpu",
    ) -> BlockMask:
        """The mask of a run-length map. `shape` is (B, H): the map's numbers, or any where it has 1."""
        self = cls.__new__(cls)
        shape = (block_map.batch, block_map.heads) if shape is None else shape
        BlockListing.__init__(self, block_map, shape, mask_mod, torch.device(device))
        return self

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: MaskFunction | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | bool | None = None,
    ) -> BlockMask:
        """From the lists of blocks of each query block, in any order; see the class.

        Raises:
            InvalidBlockMask: lists, lengths or block sizes that do not fit each other.
        """
        block_q, block_kv = block_sizes(BLOCK_SIZE)
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * block_q, kv_indices.shape[-1] * block_kv)
        wanted = kv_num_blocks if compute_q_blocks else None
        return cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            wanted,
            BLOCK_SIZE=(block_q, block_kv),
            mask_mod=noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, torch.Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )

    @classmethod
    def from_torch(cls, block_mask: TorchBlockMask) -> BlockMask:
        """The same mask as one of PyTorch's. Reads its lists on the host, so it waits for their device."""
        q_len, kv_len = block_mask.seq_lengths
        return cls.from_kv_blocks(
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
            mask_mod=block_mask.mask_mod,
            seq_lengths=(int(q_len), int(kv_len)),
            compute_q_blocks=block_mask.q_indices is not None,
            # Only newer versions of PyTorch know these.
            dq_write_order=getattr(block_mask, "dq_write_order", None),
            dq_write_order_full=getattr(block_mask, "dq_write_order_full", None),
            dq_kv_order=block_mask._dq_kv_order() if hasattr(block_mask, "_dq_kv_order") else None,
        )

    def to_torch(self) -> TorchBlockMask:
        """The same mask as a `torch.nn.attention.flex_attention.BlockMask`."""
        from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

        orders: dict[str, Any] = {
            "dq_write_order": self.dq_write_order,
            "dq_write_order_full": self.dq_write_order_full,
            "dq_kv_order": self.dq_kv_order,
            "dq_kv_order_spt": self.dq_kv_order_spt,
        }
        return TorchBlockMask(
            self.seq_lengths,
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            self.q_num_blocks,
            self.q_indices,
            self.full_q_num_blocks,
            self.full_q_indices,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self.mask_mod,
            # Only newer versions of PyTorch know these.
            **{name: order for name, order in orders.items() if order is not None},
        )

    @property
    def block_map(self) -> BlockMap | DeviceMap | None:
        """The run-length map for `seq_lengths`; None for a mask of one huge block, which says nothing.

        Raises:
            BlockMaskMismatch: `seq_lengths` has another number of blocks than the mask, as after slicing.
        """
        if self.BLOCK_SIZE == (ONE_BLOCK, ONE_BLOCK):
            return None
        for known in (self._source, self._refitted):
            if known is not None and (known.q_len, known.kv_len) == self.seq_lengths:
                return known
        extent = TileGrid(*self.seq_lengths, *self.BLOCK_SIZE, 1, 1)
        if (extent.q_blocks, extent.kv_blocks) != (self._source.q_blocks, self._source.kv_blocks):
            raise BlockMaskMismatch(
                f"seq_lengths {self.seq_lengths} make {extent.q_blocks} x {extent.kv_blocks} blocks of "
                f"{self.BLOCK_SIZE}; the block mask has {self._source.q_blocks} x {self._source.kv_blocks}",
                hint="after slicing query blocks, assign block_mask.seq_lengths = (q_len, kv_len)",
            )
        self._refitted = select_rows(self._map, rows_of(self._map), extent)
        return self._refitted

    def schedule(self) -> Schedule:
        """The work of each query block in full tiles, and the order to start them in: heaviest first.

        Of the batches and heads that differ: one, where the mask does not read `b` or `h`. `schedule().order`
        is int32 numpy; `torch.from_numpy(...)` makes it a tensor.
        """
        return schedule(self._map)

    def to(self, device: DeviceLike) -> BlockMask:
        """The same mask with its tensors on `device`. What `mask_mod` captured stays where it is."""
        moved = BlockMask.__new__(BlockMask)
        moved.__dict__.update(self.__dict__)
        moved._device = torch.device(device)
        moved._lists = {}
        partial, full = self._write_orders
        moved._write_orders = (_moved(partial, moved._device), _moved(full, moved._device))
        moved.dq_kv_order = _moved(self.dq_kv_order, moved._device)
        return moved

    def __getitem__(self, index: Index | tuple[Index, ...]) -> BlockMask:
        """The mask of some batches, heads and query blocks. Every dimension stays, also under an integer.

        `mask_mod` must be assigned before the result is used: a function of the new indices. So must
        `seq_lengths` when query blocks were chosen.

        Raises:
            BlockIndexOutOfRange: an integer, or one of a tensor, is outside.
            InvalidBlockMask: there are more than three indices, or more than one is a tensor.
            UnsupportedFeature: the mask has a tensor `dq_kv_order`, which is of its own blocks.
        """
        if self.dq_kv_order is not None:
            raise UnsupportedFeature("a block mask with a tensor dq_kv_order can't be sliced")
        rows = chosen_rows(self._map, self._shape, index)
        extent = TileGrid(rows.shape[2] * self.BLOCK_SIZE[0], self._map.kv_len, *self.BLOCK_SIZE, 1, 1)
        shape = (rows.shape[0], rows.shape[1])
        if self._map.batch == 1:  # what the map shares stays shared
            rows = rows[:1]
        if self._map.heads == 1:
            rows = rows[:, :1]
        part = self._like(select_rows(self._map, rows, extent), shape, sliced_mask_mod)
        part.seq_lengths = self.seq_lengths
        return part

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner of the mask, for shorter lengths; `mask_mod` stays.

        Raises:
            BlockMaskMismatch: a length is above the mask's own.
            UnsupportedFeature: the mask has a tensor `dq_kv_order`, which is of its own blocks.
        """
        if self.dq_kv_order is not None:
            raise UnsupportedFeature("a block mask with a tensor dq_kv_order can't be cut to other lengths")
        if new_q_len > self.seq_lengths[0] or new_kv_len > self.seq_lengths[1]:
            raise BlockMaskMismatch(
                f"lengths ({new_q_len}, {new_kv_len}) exceed those of the block mask, {self.seq_lengths}",
                hint="make a new block mask",
            )
        extent = TileGrid(new_q_len, new_kv_len, *self.BLOCK_SIZE, 1, 1)
        rows = rows_of(self._map)[:, :, : extent.q_blocks]
        return self._like(select_rows(self._map, rows, extent), self._shape, self.mask_mod)

    def _like(self, block_map: BlockMap, shape: tuple[int, int], mask_mod: MaskFunction) -> BlockMask:
        """A mask of another map that makes the same lists as this one."""
        other = BlockMask.from_map(block_map, mask_mod, shape=shape, device=self._device)
        other._separate_full, other._has_q = self._separate_full, self._has_q
        other.dq_kv_order_spt = self.dq_kv_order_spt
        if self.dq_write_order is not None:
            other._write_orders = other.rank_writes(bool(self.dq_kv_order_spt))
        return other


register(BlockMask)


def as_block_mask(block_mask: BlockMask | TorchBlockMask) -> BlockMask:
    """A block mask of flexc or of PyTorch as one of flexc, converted once as long as it stays the same.

    Raises:
        NotAMod: it is neither.
        SlicedBlockMask: it was sliced, and its mask_mod not set since.
    """
    if not isinstance(block_mask, BlockMask):
        block_mask = converted(block_mask, BlockMask.from_torch)
    if block_mask.mask_mod is sliced_mask_mod:
        sliced_mask_mod(None, None, None, None)
    return block_mask


def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: DeviceLike | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    budget: float = DEFAULT_BUDGET,
) -> BlockMask:
    """The block mask of a mask function, found without the dense mask.

    Args:
        mask_mod: `f(b, h, q_idx, kv_idx) -> bool`, True where a pair may attend.
        B: batch size; None (or 1) where the mask does not depend on `b`.
        H: number of query heads; None (or 1) where the mask does not depend on `h`.
        Q_LEN: query length, any.
        KV_LEN: key length, any.
        device: of the mask's tensors; by default the accelerator if there is one.
        BLOCK_SIZE: of queries and keys, at least 16.
        _compile: accepted for PyTorch's sake; there is nothing to compile.
        separate_full_blocks: list full blocks apart; otherwise all that are not empty are listed as partial.
        compute_dq_write_order: also rank the blocks for PyTorch's deterministic FLASH backward.
        dq_kv_order: with that, rank by descending kv block.
        budget: the most pairs at which the mask is evaluated. Analysis decides most tiles without; a mask
            that leaves many open is refused as soon as it is foreseen to take more. `math.inf`: no limit.

    Raises:
        MaskTooOpen: the budget does not suffice; the message says what the whole would cost.
        InvalidBlockMask: a block size below 16, or a length that is no integer of 0 or more.
        NotAMod, TraceError: `mask_mod` is no mask, or can't be traced.
    """
    from flexc.ir.simplify import simplify
    from flexc.map_cache import blocks_of
    from flexc.mods import as_mask_mod

    if torch.compiler.is_compiling():
        from flexc import uncompiled

        asked = (mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks, budget)
        return uncompiled.create_block_mask(asked, compute_dq_write_order, dq_kv_order)
    where = default_device() if device is None else torch.device(device)
    torch.empty(0, device=where)  # a device that is not there fails here, as in PyTorch
    block_q, block_kv = block_sizes(BLOCK_SIZE)
    q_len, kv_len = _count("Q_LEN", Q_LEN), _count("KV_LEN", KV_LEN)
    shape = (1 if B is None else _count("B", B), 1 if H is None else _count("H", H))
    trace = as_mask_mod(mask_mod).trace()
    mask, grid = simplify(trace.graph.root), TileGrid(q_len, kv_len, block_q, block_kv, *shape)
    block_map = blocks_of(mask, trace.graph.captures, trace.values, grid, where, budget)
    remember(block_map, mask, trace.values)
    result = BlockMask.from_map(block_map, mask_mod, shape=shape, device=where)
    result._separate_full = separate_full_blocks
    if compute_dq_write_order:
        result.dq_kv_order_spt = dq_kv_order
        result._write_orders = result.rank_writes(dq_kv_order)
    return result


def _count(name: str, value: object) -> int:
    """A length or a number of batches or heads: any integer type, also a tensor's, from 0."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidBlockMask(f"{name} is {value!r}", hint=f"{name} is an integer") from None
    if number < 0:
        raise InvalidBlockMask(f"{name} is {number}: it can't be negative")
    return number


def _moved(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if x is None else x.to(device)
