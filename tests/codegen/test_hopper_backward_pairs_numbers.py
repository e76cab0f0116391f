"""What Hopper backwards in fp32 compute, from pairs of fp16 numbers: run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flexc import masks
from flexc.call import AttentionCall
from flexc.choice import backward_parts
from flexc.codegen.arguments import Source
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import ROWS_PADDED_TO, BackwardSpec, Entry, backward_spec
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import TARGETS
from flexc.ir.types import Storage
from flexc.tensor_maps import block_of, is_descriptor
from tests.codegen.backward_operands import plain_operands
from tests.codegen.generate import Mod, spec_for
from tests.codegen.test_hopper_backward_numbers import _expected
from tests.gluon_backward_in_numpy import Rows, run_backward
from tests.gradients import problem

HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 1, 140, 201
ALIVE = torch.arange(300) % 5 != 2


def _alive(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ALIVE[q_idx] & (q_idx >= kv_idx)


def _all(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


def _pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, rows, 2 * 128) fp16 and the unit of each row, rows padded: what the kernel before leaves."""
    padded = torch.zeros(*x.shape[:2], -(-x.shape[2] // ROWS_PADDED_TO) * ROWS_PADDED_TO, 128)
    padded[:, :, : x.shape[2], : x.shape[3]] = x
    largest = padded.abs().amax(3).clamp(min=2.0**-100)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - 14)
    padded = padded / unit[..., None]
    return torch.cat([padded.half(), (padded - padded.half().float()).half()], 3), unit


def _given(
    call: AttentionCall, made: BackwardSpec, kernel: GeneratedKernel, tensors: dict[Source, torch.Tensor]
) -> dict[str, Any]:
    """The arguments of one kernel: what its descriptors say of tensors is in their types."""
    found = plain_operands(call, made, kernel, tensors)
    for argument in filter(is_descriptor, kernel.arguments):
        source = Source(argument.source.value.removesuffix("_descriptor"))
        count, *width = block_of(argument)[1]
        found[argument.name] = Rows(tensors[source].numpy(), count, *width)
    return found


@pytest.mark.parametrize("mask", [None, masks.causal, masks.sliding_window(40), _alive])
@pytest.mark.parametrize(("dim", "dim_v"), [(96, 80)])
def test_gradients(mask: Mod | None, dim: int, dim_v: int) -> None:
    torch.manual_seed(0)
    shapes = ((HEADS, Q_LEN, dim), (KV_HEADS, KV_LEN, dim), (KV_HEADS, KV_LEN, dim_v), (HEADS, Q_LEN, dim_v))
    q, k, v, grad = (torch.randn(1, *shape) for shape in shapes)
    call = problem(q, k, v, mask_mod=mask).call
    out, lse, expected = _expected(_all if mask is None else mask, q, k, v, grad, call.scale)
    padded = -(-Q_LEN // ROWS_PADDED_TO) * ROWS_PADDED_TO
    delta, shift = torch.zeros(1, HEADS, padded), torch.full((1, HEADS, padded), torch.inf)
    delta[:, :, :Q_LEN] = (out * grad.double()).sum(3)
    shift[:, :, :Q_LEN] = torch.where(lse.isinf(), torch.inf, lse / np.log(2.0))
    results = [torch.full(x.shape, torch.nan) for x in (q, k, v)]
    tensors = dict(zip((Source.GRAD_Q, Source.GRAD_K, Source.GRAD_V), results, strict=True))
    tensors |= {Source.DELTA: delta, Source.SHIFT: shift, Source.LOST: torch.zeros(1, dtype=torch.int32)}
    for x, name in ((q, "q"), (k, "k"), (v, "v"), (grad, "grad_out")):
        tensors[Source(f"{name}_pairs")], tensors[Source(f"{name}_unit")] = _pairs(x)
    spec = spec_for(mask, head_dim=dim, head_dim_v=dim_v, storage=Storage.FP32)
    backward = backward_spec(spec, call.values, (Q_LEN, KV_LEN))
    for made, entry in backward_parts(backward, "sm90", (), hopper=True):
        if entry in (Entry.HOPPER, Entry.HOPPER_Q):
            kernel = lower_backward(made, entry, TARGETS["sm90"])
            tiles = kernel.plan.tiles
            by_keys = -(-KV_LEN // tiles.block_kv) * KV_HEADS
            programs = by_keys if entry is Entry.HOPPER else -(-Q_LEN // tiles.block_q) * HEADS
            run_backward(kernel.source, _given(call, made, kernel, tensors), programs, entry=entry.value)
    assert tensors[Source.LOST].item() == 0
    for found, wanted in zip(results, expected, strict=True):
        assert np.abs(found.numpy() - wanted).max() < 2e-6 * np.abs(wanted).max()
