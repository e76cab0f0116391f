"""Block masks that are made inside a compiled function: their blocks are found when someone asks for them.

Attention in the same compiled function does not ask: it has the mask_mod, and finds the blocks itself, once
for all layers that share it. So torch.compile can trace the making of a mask, which then costs nothing.
"""

from __future__ import annotations

import torch

from flexc.block_lists import block_sizes
from flexc.block_mask import BlockMask
from flexc.block_tree import register
from flexc.device_map import DeviceMap
from flexc.ir.blockmap import BlockMap
from flexc.mask_functions import DeviceLike, MaskFunction, default_device


class DeferredBlockMask(BlockMask):
    """A block mask of a mask function whose blocks are not known yet."""

    def __init__(
        self,
        mask_mod: MaskFunction,
        B: int | None,
        H: int | None,
        Q_LEN: int,
        KV_LEN: int,
        device: DeviceLike | None,
        BLOCK_SIZE: int | tuple[int, int],
        separate_full_blocks: bool,
        budget: float,
    ) -> None:
        self._asked = (mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks, budget)
        self._found: BlockMask | None = None
        self._refitted = None
        self._shape = (1 if B is None else B, 1 if H is None else H)
        self._separate_full = separate_full_blocks
        self._has_q = True
        self._lists = {}
        self._write_orders = (None, None)
        self.mask_mod = mask_mod
        self.seq_lengths = (Q_LEN, KV_LEN)
        self.BLOCK_SIZE = block_sizes(BLOCK_SIZE)
        self.dq_kv_order = None
        self.dq_kv_order_spt = None

    @property
    def block_map(self) -> BlockMap | DeviceMap | None:
        """As of any block mask; None while torch.compile traces: the mask_mod says all that it would."""
        if (
            self._found is None
            and torch.compiler.is_dynamo_compiling()
            and self.mask_mod is self._asked[0]
            and self.seq_lengths == (self._asked[3], self._asked[4])
        ):
            return None
        found = self._whole()
        found.seq_lengths = self.seq_lengths
        return found.block_map

    def _whole(self) -> BlockMask:
        if self._found is None:
            from flexc import uncompiled

            self._found = uncompiled.made_between_graphs(self._asked)
        return self._found

    @property
    def _source(self) -> BlockMap | DeviceMap:  # type: ignore[override]
        return self._whole()._source

    @property
    def _device(self) -> torch.device:  # type: ignore[override]
        device = self._asked[5]
        return default_device() if device is None else torch.device(device)

    def to(self, device: DeviceLike) -> BlockMask:
        """The same mask with its tensors on `device`."""
        moved = self._whole().to(device)
        moved.mask_mod, moved.seq_lengths = self.mask_mod, self.seq_lengths
        return moved


register(DeferredBlockMask)
