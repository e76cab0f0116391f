"""What a generated backward is called with in `gluon_backward_in_numpy`: all but descriptors."""

from __future__ import annotations

from typing import Any

import torch

from flexc.call import AttentionCall
from flexc.codegen.arguments import Source
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.module import GeneratedKernel
from flexc.ir.spec import Blocks
from flexc.pack_backward import Operands, map_operands
from flexc.tensor_maps import is_descriptor


def numpy_operand(x: torch.Tensor) -> Any:
    """A tensor of the CPU as an array; bf16 as fp32, of booleans as bytes."""
    x = x.float() if x.dtype is torch.bfloat16 else x.to(torch.int8) if x.dtype is torch.bool else x
    return x.contiguous().numpy()


def plain_operands(
    call: AttentionCall, made: BackwardSpec, kernel: GeneratedKernel, tensors: dict[Source, Any]
) -> dict[str, Any]:
    """By name; `tensors` are those that the call itself does not have, or has in another form."""
    tiles, entry = kernel.plan.tiles, Entry(kernel.entry)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = call.q.shape, call.k.shape
    numbers: dict[Source, int | float] = {
        Source.Q_HEADS: heads, Source.GROUP: heads // kv_heads, Source.BATCH: batch, Source.Q_LEN: q_len,
        Source.KV_LEN: kv_len, Source.SCALE: call.scale, Source.NEVER: 0,
    }  # fmt: skip
    if made.blocks(entry) is Blocks.MAP:
        for beside in (False, True) if call.deterministic else (False,):
            of_map, more, _ = map_operands(
                call, tiles.block_q, tiles.block_kv, by_keys=entry.axes.by_keys, beside=beside
            )
            tensors = tensors | of_map
            numbers |= more
    named = [a for a in kernel.arguments if not is_descriptor(a) and a.source is not Source.COUNTER]
    packed = Operands(tensors, numbers, call.values).pack(named, lambda x: x)
    return {
        a.name: numpy_operand(x) if isinstance(x, torch.Tensor) else x
        for a, x in zip(named, packed, strict=True)
    }
