"""What decides the kernels of a backward, beyond what decides those of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from flexc.codegen.blocks import choose_blocks, exact_ranges, turned
from flexc.codegen.bounds import BY_KEYS, BY_QUERIES, Axes
from flexc.codegen.reach import few_see_a_key
from flexc.ir.ranges import Ranges
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import Storage

ROWS_PADDED_TO = 256
"""What is kept of rows, delta and shift, has a multiple of this many rows a head: no tile needs a mask."""


SLICE, PIECE = 128, 32
_WIDEST_WHOLE = 256


class Entry(Enum):
    """The kernels that backwards are made of, in order of their launch; the value is the function's name.

    Which of them make up one is said by `backward_schedule`.
    """

    ROWS = "attention_backward_rows"
    """What every row needs once: delta, and the shift of its scores. Also the gradient of the sinks."""
    PAIRS = "attention_backward_pairs"
    """The operands in fp32 as pairs of fp16 numbers, for the others."""
    Q = "attention_backward_q"
    """The gradient of q; see also `BackwardSpec.finds_delta`."""
    KV = "attention_backward_kv"
    """Gradients of k, v and captured tensors."""
    FUSED = "attention_backward_fused"
    """Both in one: that of q as sums in fp32, which programs add to in any order."""
    Q_SUMS = "attention_backward_q_sums"
    """The gradient of q from these sums."""
    CAPTURED = "attention_backward_captured"
    """Gradients of captured tensors, from what the kernel before added up by row or distance."""
    HOPPER = "attention_backward"
    """As the fused one, made for Hopper."""
    HOPPER_Q = "attention_backward_queries"
    """The gradient of q, made for Hopper, where the one before leaves it."""
    FINISH = "attention_backward_finish"
    """The gradient of q from these sums."""

    @property
    def axes(self) -> Axes:
        """What a program keeps a tile of, and what it walks."""
        return BY_KEYS if self in (Entry.KV, Entry.FUSED, Entry.HOPPER) else BY_QUERIES


@dataclass(frozen=True, slots=True)
class BackwardSpec:
    """A backward, less what may change without new kernels.

    `forward.blocks` says how kernels that keep queries find their tiles, `kv_blocks` how those that keep keys
    do. `has_grad_lse`: a gradient of the lse comes in beside that of the result. `slots`: captured tensors
    whose gradients are wanted. `deterministic`: these are the same bits every time. `repairs`: the kernels do
    nothing unless a NaN came out of others. `clears_sums`: the kernel of the rows clears what the Hopper
    kernel adds to. `pairs`: they read operands in fp32 as pairs of fp16 numbers.
    `short`: a key is seen by few queries, so that the Hopper kernel's programs are short.
    """

    forward: AttentionSpec
    kv_blocks: Blocks
    has_grad_lse: bool = False
    slots: tuple[int, ...] = ()
    deterministic: bool = False
    repairs: bool = False
    clears_sums: bool = False
    pairs: bool = False
    short: bool = False

    def blocks(self, entry: Entry) -> Blocks:
        """How a kernel knows which tiles to visit."""
        return self.kv_blocks if entry.axes.by_keys else self.forward.blocks

    def ranges(self, entry: Entry) -> Ranges | None:
        """The closed form that a kernel computes its loop bounds from; None for one that does not.

        The rows of the ranges are the axis that the kernel keeps: see `Entry.axes`.
        """
        mask = self.forward.mask
        if self.blocks(entry) is not Blocks.RANGES or mask is None:
            return None
        return exact_ranges(turned(mask, entry.axes))

    @property
    def slices(self) -> int:
        """How many programs share the head dimensions of a tile: each writes gradients of `SLICE` of them.

        Tiles of fp32 with more than 256 dimensions fit neither shared memory nor registers. Each program then
        reads the scores' operands piece by piece.
        """
        spec = self.forward
        widest = max(spec.head_dim, spec.head_dim_v)
        is_wide = spec.q_storage is Storage.FP32 and widest > _WIDEST_WHOLE
        return -(-widest // SLICE) if is_wide else 1

    @property
    def finds_delta(self) -> bool:
        """Whether the kernel of dQ finds delta anew, for the gradients of captured tensors.

        The output gives delta only as exactly as it was rounded, so that the gradients of a row's scores do
        not add up to zero; those of captured tensors that a whole row shares add these errors up.
        """
        return bool(self.slots) and self.forward.q_storage in (Storage.BF16, Storage.FP16)

    @property
    def stores_first(self) -> bool:
        """Whether the first keys in order write sums of dQ, and the others add to them: none is cleared."""
        return self.deterministic

    def describe(self) -> str:
        """One line for headers and lists."""
        return f"backward of {self.forward.describe()}"


def backward_spec(
    forward: AttentionSpec,
    values: Sequence[object],
    lengths: tuple[int, int] | None,
    *,
    given: bool = False,
    wanted: object = None,
    has_grad_lse: bool = False,
    slots: tuple[int, ...] = (),
    deterministic: bool = False,
) -> BackwardSpec:
    """The spec of the backward of a call, less what only a forward knows.

    Args:
        forward: of the call.
        values: captured ones by slot. With the lengths they decide whether the mask's closed form holds for
            kernels that walk the queries of each key.
        lengths: (q_len, kv_len); None for kernels of any length.
        given: whether the user passed a block map.
        wanted: the option `blocks`.
        has_grad_lse: see `BackwardSpec`.
        slots: see `BackwardSpec`.
        deterministic: see `BackwardSpec`.
    """
    kv_blocks = choose_blocks(forward.mask, values, given=given, lengths=lengths, wanted=wanted, axes=BY_KEYS)
    of_forward = replace(forward, return_lse=True, bounded=False)  # weights come from the lse in any case
    found = BackwardSpec(of_forward, kv_blocks, has_grad_lse, slots, deterministic)
    return replace(found, short=few_see_a_key(forward.mask, found.ranges(Entry.HOPPER), values))
