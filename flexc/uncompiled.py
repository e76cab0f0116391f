"""What torch.compile calls in place of tracing flexc. Imported there only: it loads the compiler."""

from __future__ import annotations

from typing import Any

import torch

from flexc import block_mask
from flexc.deferred_mask import DeferredBlockMask


def create_block_mask(
    asked: tuple[Any, ...], compute_dq_write_order: bool, dq_kv_order: bool
) -> block_mask.BlockMask:
    """A block mask whose blocks are found later, unless more than they were asked for."""
    if torch.compiler.is_dynamo_compiling() and not compute_dq_write_order:
        return DeferredBlockMask(*asked)
    made: block_mask.BlockMask = made_between_graphs(asked, compute_dq_write_order, dq_kv_order)
    return made


def _made(asked: tuple[Any, ...], compute_dq_write_order: bool = False, dq_kv_order: bool = True) -> Any:
    mask_mod, batch, heads, q_len, kv_len, device, block_size, separate_full, budget = asked
    return block_mask.create_block_mask(
        mask_mod,
        batch,
        heads,
        q_len,
        kv_len,
        device=device,
        BLOCK_SIZE=block_size,
        separate_full_blocks=separate_full,
        compute_dq_write_order=compute_dq_write_order,
        dq_kv_order=dq_kv_order,
        budget=budget,
    )


made_between_graphs: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _made, reason="blocks of a mask are found between graphs: make it outside, or only pass it as block_mask="
)
