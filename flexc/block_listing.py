"""A block mask as PyTorch shows it: lists of blocks as tensors, and text."""

from __future__ import annotations

import math

import numpy as np
import torch

from flexc.block_lists import Array, BlockLists, dense_kinds, rank_tiles, to_lists, visited_blocks
from flexc.device_map import DeviceMap, on_host
from flexc.ir.blockmap import BlockMap, TileKind
from flexc.ir.overview import Overview, overview
from flexc.mask_functions import MaskFunction

_SHADES = (" ", "░", "█")


class BlockListing:
    """What `BlockMask` shows of its run-length map. Tensors are made on first use and kept.

    A full tile that hangs over the q length is listed as partial, as PyTorch counts it; the map keeps it
    full.
    """

    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskFunction
    dq_kv_order: torch.Tensor | None
    dq_kv_order_spt: bool | None

    def __init__(
        self,
        block_map: BlockMap | DeviceMap,
        shape: tuple[int, int],
        mask_mod: MaskFunction,
        device: torch.device,
    ) -> None:
        self._source = block_map
        self._refitted: BlockMap | None = None
        self._shape = shape
        self._device = device
        self._separate_full = True
        self._has_q = True
        self._lists: dict[tuple[bool, bool], BlockLists] = {}
        self._write_orders: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.mask_mod = mask_mod
        self.seq_lengths = (block_map.q_len, block_map.kv_len)
        self.BLOCK_SIZE = (block_map.block_q, block_map.block_kv)
        self.dq_kv_order = None
        self.dq_kv_order_spt = None

    @property
    def _map(self) -> BlockMap:
        """The map on the host. One on a device is copied when its blocks are first asked for."""
        return on_host(self._source)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, q length, kv length)."""
        return (*self._shape, *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """Where the tensors are made."""
        return self._device

    @property
    def kv_num_blocks(self) -> torch.Tensor:
        """How many partial blocks each query block has: (B, H, q blocks) int32."""
        return self._listed(full=False, by_query=True).counts

    @property
    def kv_indices(self) -> torch.Tensor:
        """Which they are: (B, H, q blocks, kv blocks) int32, ascending; after them the others."""
        return self._listed(full=False, by_query=True).indices

    @property
    def full_kv_num_blocks(self) -> torch.Tensor | None:
        """As `kv_num_blocks`, of full blocks; None where they are not listed apart."""
        return self._listed(full=True, by_query=True).counts if self._separate_full else None

    @property
    def full_kv_indices(self) -> torch.Tensor | None:
        """As `kv_indices`, of full blocks; None where they are not listed apart."""
        return self._listed(full=True, by_query=True).indices if self._separate_full else None

    @property
    def q_num_blocks(self) -> torch.Tensor | None:
        """How many partial blocks each key block has: (B, H, kv blocks) int32; None where not wanted."""
        return self._listed(full=False, by_query=False).counts if self._has_q else None

    @property
    def q_indices(self) -> torch.Tensor | None:
        """Which they are: (B, H, kv blocks, q blocks) int32; None where not wanted."""
        return self._listed(full=False, by_query=False).indices if self._has_q else None

    @property
    def full_q_num_blocks(self) -> torch.Tensor | None:
        """As `q_num_blocks`, of full blocks; None where they are not listed apart."""
        wanted = self._has_q and self._separate_full
        return self._listed(full=True, by_query=False).counts if wanted else None

    @property
    def full_q_indices(self) -> torch.Tensor | None:
        """As `q_indices`, of full blocks; None where they are not listed apart."""
        wanted = self._has_q and self._separate_full
        return self._listed(full=True, by_query=False).indices if wanted else None

    @property
    def dq_write_order(self) -> torch.Tensor | None:
        """Ranks of the partial blocks, for PyTorch's deterministic FLASH backward; None where not wanted."""
        return self._write_orders[0]

    @property
    def dq_write_order_full(self) -> torch.Tensor | None:
        """As `dq_write_order`, of full blocks."""
        return self._write_orders[1]

    def rank_writes(self, descending: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`dq_write_order` and `dq_write_order_full` for an ascending or descending order of kv blocks."""
        ranks = torch.from_numpy(rank_tiles(self._kinds() != TileKind.EMPTY, descending)).transpose(-2, -1)
        orders = [
            ranks.gather(-1, self._listed(full=full, by_query=False).indices.cpu().long()).to(self._device)
            for full in ((False, True) if self._separate_full else (False,))
        ]
        return orders[0], orders[1] if self._separate_full else None

    def as_tuple(self, flatten: bool = True) -> tuple[object, ...]:
        """PyTorch's attributes, in the order of its constructor; `flatten` splits lengths and block sizes."""
        return (
            *(self.seq_lengths if flatten else (self.seq_lengths,)),
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            self.q_num_blocks,
            self.q_indices,
            self.full_q_num_blocks,
            self.full_q_indices,
            self.dq_write_order,
            self.dq_write_order_full,
            self.dq_kv_order,
            self.dq_kv_order_spt,
            *(self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)),
            self.mask_mod,
        )

    def numel(self) -> int:
        """The number of pairs, seen or not."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """The percentage of pairs in blocks that are not visited.

        Visited blocks count whole, as in PyTorch, also where they reach over the lengths; it is 0 at least.
        """
        total = self.numel()
        if total == 0:
            return 0.0
        shared = math.prod(self._shape) // (self._map.batch * self._map.heads)
        visited = visited_blocks(self._map) * shared * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1]
        return max(0.0, 100 * (1 - visited / total))

    def to_dense(self) -> torch.Tensor:
        """Which blocks are visited: (B, H, q blocks, kv blocks) int32 of 0 and 1."""
        return torch.from_numpy((self._kinds() != TileKind.EMPTY).astype(np.int32)).to(self._device)

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The blocks as pictures of at most `grid_size` cells (-1: all), of the first `limit` heads.

        Costs by the number of runs and cells, so a mask of any length can be printed.
        """
        pictures: list[str] = []
        for position in np.ndindex(*self._shape):
            if len(pictures) == limit:
                pictures += [
                    "...",
                    "To print out more, set BlockMask.to_string(limit=N)",
                    "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
                ]
                break
            b, h = (min(i, n - 1) for i, n in zip(position, (self._map.batch, self._map.heads), strict=True))
            rows, columns = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
            pictures.append(
                f"{tuple(map(int, position))}\n{_draw(overview(self._map, rows, columns, b=b, h=h))}"
            )
        return "\n".join(pictures)

    def __str__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"
        )

    def __repr__(self) -> str:
        outer, q_blocks, kv_blocks = self._shape, self._map.q_blocks, self._map.kv_blocks
        by_query, by_key = (*outer, q_blocks), (*outer, kv_blocks)
        shapes: dict[str, tuple[int, ...] | None] = {
            "kv_num_blocks": by_query,
            "kv_indices": (*by_query, kv_blocks),
            "full_kv_num_blocks": by_query if self._separate_full else None,
            "full_kv_indices": (*by_query, kv_blocks) if self._separate_full else None,
            "q_num_blocks": by_key if self._has_q else None,
            "q_indices": (*by_key, q_blocks) if self._has_q else None,
            "full_q_num_blocks": by_key if self._has_q and self._separate_full else None,
            "full_q_indices": (*by_key, q_blocks) if self._has_q and self._separate_full else None,
        }
        lines = [
            f"{name}={None if shape is None else torch.Size(shape)}" for name, shape in shapes.items()
        ] + [
            f"BLOCK_SIZE={self.BLOCK_SIZE}",
            f"shape={self.shape}",
            f"sparsity={self.sparsity():.2f}%",
            f"mask_mod={getattr(self.mask_mod, '__name__', self.mask_mod)}",
        ]
        return "BlockMask(\n" + ",\n".join(f"    {line}" for line in lines) + "\n)"

    def _kinds(self) -> Array:
        """The kind of every tile as it is listed: (B, H, q blocks, kv blocks)."""
        kinds = dense_kinds(self._map)
        if not self._separate_full:
            kinds = np.minimum(kinds, TileKind.PARTIAL)
        elif self._map.q_len % self._map.block_q:
            kinds[:, :, -1] = np.minimum(kinds[:, :, -1], TileKind.PARTIAL)
        return np.broadcast_to(kinds, (*self._shape, *kinds.shape[2:]))

    def _listed(self, *, full: bool, by_query: bool) -> BlockLists:
        lists = self._lists.get((full, by_query))
        if lists is None:
            listed = self._kinds() == (TileKind.FULL if full else TileKind.PARTIAL)
            made = to_lists(np.ascontiguousarray(listed if by_query else listed.swapaxes(-2, -1)))
            lists = BlockLists(made.counts.to(self._device), made.indices.to(self._device))
            self._lists[full, by_query] = lists
        return lists


def _draw(cells: Overview) -> str:
    """Cells of two characters: nothing, some or all of their blocks are visited."""
    visited = cells.partial + cells.full
    shades = (visited > 0).astype(np.int64) + (visited == cells.tiles)
    return "".join("".join(_SHADES[shade] * 2 for shade in row) + "\n" for row in shades.tolist())
