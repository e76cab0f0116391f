"""Everything that decides which kernel an attention call needs. Lengths, strides and values are not here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.types import Storage


class Captured(Protocol):
    """What writing a graph as code must know of its captures: any spec of a kernel has it."""

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures by slot."""
        ...

    @property
    def unit_stride(self) -> frozenset[int]:
        """Slots of captured tensors whose last dimension is contiguous."""
        ...


class Blocks(Enum):
    """How a kernel knows which tiles of keys to visit."""

    ALL = "all"
    """Every one of them."""
    MAP = "map"
    """From a block map, which was found for the lengths and captures of the call."""
    RANGES = "ranges"
    """From the mask's closed form, evaluated at the rows of each tile: nothing is found beforehand."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A call, less what may change without a new kernel: lengths, batch, heads, strides, values, block maps.

    `score` and `mask` are simplified and share the numbering of `captures`.
    """

    score: Expr | None
    mask: Expr | None
    captures: tuple[Capture, ...]
    head_dim: int
    head_dim_v: int
    q_storage: Storage
    k_storage: Storage
    v_storage: Storage
    blocks: Blocks
    has_sinks: bool = False
    return_lse: bool = False
    allow_tf32: bool = False
    aligned: bool = True
    """Addresses and strides of q, k, v and out are multiples of 16 bytes."""
    positive_scale: bool = True
    """The softmax scale is above zero: a masked score may then be scaled after it was set to -inf."""
    long_indices: bool = False
    """A length exceeds 2**24: differences of indices are then not exact in 32-bit floats."""
    unit_stride: frozenset[int] = frozenset()
    """Slots of captured tensors whose last dimension is contiguous."""
    max_block_q: int = 256
    """Tiles of the kernel must divide the blocks of the user's map: the largest power of two that does."""
    max_block_kv: int = 256
    bounded: bool = False
    """Scores are so near zero that a softmax needs no largest one."""
    dropout: bool = False
    """Weights are dropped, with a probability that is known at the call."""
    few_rows: int = 0
    """Query rows of a head in a tile, where a call has few; else 0, and the plan decides."""
    packed_heads: int = 1
    """Query heads whose rows share a tile; past the heads of a group its last one is repeated."""
    narrow: bool = False
    """Neighbouring rows see few keys, in a band that moves on with them, and the plan goes by that."""
    walk: int = 0
    """Tiles of keys that programs hold which walk along a head, since its rows see no more; 0: none do."""

    def describe(self) -> str:
        """One line for headers and lists."""
        mods = [
            name for name, root in (("score_mod", self.score), ("mask_mod", self.mask)) if root is not None
        ]
        dims = (
            f"D={self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"D={self.head_dim}, Dv={self.head_dim_v}"
        )
        kinds = sorted({s.value for s in (self.q_storage, self.k_storage, self.v_storage)})
        return f"{' and '.join(mods) or 'plain attention'}, {dims}, {'/'.join(kinds)}"
