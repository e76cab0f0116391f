"""What decides the kernels of a backward, beyond what decides those of its forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from flexc.ir.spec import AttentionSpec, Blocks

ROWS_PADDED_TO = 256
"""What is kept of rows, delta and shift, has a multiple of this many rows a head: no tile needs a mask."""


class Entry(Enum):
    """The kernels of a backward, in the order that they are launched; the value is the function's name."""

    ROWS = "attention_backward_rows"
    """What every row needs once: delta, and the shift of its scores. Also the gradient of the sinks."""
    KV = "attention_backward_kv"
    """Gradients of k and v."""
    Q = "attention_backward_q"
    """The gradient of q."""


@dataclass(frozen=True, slots=True)
class BackwardSpec:
    """A backward, less what may change without new kernels.

    `has_grad_lse`: a gradient of the lse comes in beside that of the result. `slots`: captured tensors whose
    gradients are wanted. `deterministic`: these are the same bits every time.
    """

    forward: AttentionSpec
    has_grad_lse: bool = False
    slots: tuple[int, ...] = ()
    deterministic: bool = False

    def describe(self) -> str:
        """One line for headers and lists."""
        return f"backward of {self.forward.describe()}"


def backward_spec(
    forward: AttentionSpec,
    *,
    has_grad_lse: bool = False,
    slots: tuple[int, ...] = (),
    deterministic: bool = False,
) -> BackwardSpec:
    """The spec of the backward of a call, less what only a forward knows.

    It walks a block map wherever there is a mask: that of the keys' side has no closed form yet.
    """
    blocks = Blocks.ALL if forward.blocks is Blocks.ALL else Blocks.MAP
    return BackwardSpec(replace(forward, return_lse=True, blocks=blocks), has_grad_lse, slots, deterministic)
