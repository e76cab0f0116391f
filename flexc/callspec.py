"""The part of a checked call that decides its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexc.call import AttentionCall
from flexc.codegen.blocks import choose_blocks
from flexc.codegen.kernel_form import SHORT
from flexc.codegen.softmax_form import is_near_zero
from flexc.errors import BlockMaskMismatch, UnsupportedDtype
from flexc.frontend.value import STORAGES, Value
from flexc.ir.spec import AttentionSpec


def spec_of(call: AttentionCall) -> AttentionSpec:
    """The part of a call that decides its kernel.

    Raises:
        UnsupportedDtype: an element type that the kernels do not take.
    """
    q, k, v = call.q, call.k, call.v
    if q.dtype is torch.float64:
        raise UnsupportedDtype(
            "q has dtype torch.float64, which the kernels do not take",
            hint='cast it, or use backend="reference"',
        )
    given = call.block_map
    blocks = choose_blocks(
        call.mask,
        call.values,
        given=given is not None,
        lengths=(q.shape[2], k.shape[2]),
        wanted=dict(call.options).get("blocks"),
    )
    size = q.element_size()
    aligned = all(is_aligned(x) for x in (q, k, v)) and (call.out is None or is_aligned(call.out))
    aligned = aligned and v.shape[3] * size % 16 == 0
    return AttentionSpec(
        score=call.mods.score,
        mask=call.mods.mask,
        captures=call.mods.captures,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        q_storage=STORAGES[q.dtype],
        k_storage=STORAGES[k.dtype],
        v_storage=STORAGES[v.dtype],
        blocks=blocks,
        has_sinks=call.sinks is not None,
        return_lse=call.return_lse,
        allow_tf32=call.allow_tf32 and q.dtype is torch.float32,
        aligned=aligned,
        positive_scale=call.scale > 0,
        long_indices=max(q.shape[2], k.shape[2]) >= SHORT,
        unit_stride=unit_strides(call.values) if call.values else frozenset(),
        bounded=is_near_zero(call.mods.score, call.values),
        dropout=call.dropout_p > 0,
        max_block_q=256 if given is None else _largest_power(given.block_q),
        max_block_kv=256 if given is None else _largest_power(given.block_kv),
    )


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    b, h, s, _ = x.stride()
    return ((b | h | s) * x.element_size() | x.data_ptr()) % 16 == 0


def unit_strides(values: Sequence[Value]) -> frozenset[int]:
    """Slots of tensors whose last dimension is contiguous."""
    return frozenset(
        slot for slot, x in enumerate(values) if isinstance(x, torch.Tensor) and x.dim() and x.stride(-1) == 1
    )


def _largest_power(block: int) -> int:
    power = block & -block
    if power < 16:
        raise BlockMaskMismatch(
            f"the block mask has blocks of {block}, which no tile of 16 or more divides",
            hint="use blocks that are multiples of 16, such as 128",
        )
    return min(power, 256)
