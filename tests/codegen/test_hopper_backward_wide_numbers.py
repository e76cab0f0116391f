"""What Hopper backwards of heads above 128 compute, and that no role waits for ever: run on the CPU."""

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
from flexc.codegen.hopper_backward_dims import PART, dims, is_apart
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import TARGETS
from flexc.tensor_maps import block_of, is_descriptor
from tests.codegen.backward_operands import plain_operands
from tests.codegen.generate import Mod, spec_for
from tests.codegen.test_hopper_backward_numbers import _expected
from tests.gluon_backward_in_numpy import Rows, Sums, run_backward
from tests.gluon_in_numpy import Descriptor
from tests.gradients import problem

HEADS, KV_HEADS = 2, 1
ALIVE = torch.arange(300) % 5 != 2


def _alive(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ALIVE[q_idx] & (q_idx >= kv_idx)


def _given(
    call: AttentionCall,
    made: BackwardSpec,
    kernel: GeneratedKernel,
    tensors: dict[Source, Any],
    sums: np.ndarray[Any, Any],
) -> dict[str, Any]:
    """The arguments of one kernel: what its descriptors say of tensors is in their types."""
    tiles, found = kernel.plan.tiles, plain_operands(call, made, kernel, tensors)
    for argument in filter(is_descriptor, kernel.arguments):
        source = Source(argument.source.value.removesuffix("_descriptor"))
        if source is Source.GRAD_Q_SUM:
            found[argument.name] = Sums(sums, tiles.block_q, PART, by_columns=True)
        elif source in (Source.DELTA, Source.SHIFT):
            found[argument.name] = Rows(tensors[source].numpy(), tiles.block_q)
        else:
            *_, rows, columns = block_of(argument)[1]
            found[argument.name] = Descriptor(tensors[source].numpy(), rows, columns)
    return found


@pytest.mark.parametrize("mask", [masks.causal, masks.sliding_window(40), _alive])
@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (136, 80), (256, 256)])
def test_gradients(mask: Mod, dim: int, dim_v: int) -> None:
    torch.manual_seed(0)
    q_len, kv_len = 140, 201
    shapes = ((HEADS, q_len, dim), (KV_HEADS, kv_len, dim), (KV_HEADS, kv_len, dim_v), (HEADS, q_len, dim_v))
    q, k, v, grad = (torch.randn(1, *shape).bfloat16() for shape in shapes)
    call = problem(q, k, v, mask_mod=mask).call
    out, lse, expected = _expected(mask, q, k, v, grad, call.scale)
    padded = -(-q_len // ROWS_PADDED_TO) * ROWS_PADDED_TO
    delta, shift = torch.zeros(1, HEADS, padded), torch.full((1, HEADS, padded), torch.inf)
    delta[:, :, :q_len] = (out * grad.double()).sum(3)
    shift[:, :, :q_len] = torch.where(lse.isinf(), torch.inf, lse / np.log(2.0))
    results = [torch.full(x.shape, torch.nan) for x in (q, k, v)]
    sources = (
        Source.Q, Source.K, Source.V, Source.GRAD_OUT, Source.GRAD_Q, Source.GRAD_K, Source.GRAD_V,
        Source.DELTA, Source.SHIFT, Source.LOST, Source.GRAD_Q_SUM,
    )  # fmt: skip
    rest = (delta, shift, torch.zeros(1, dtype=torch.int32), delta)
    tensors = dict(zip(sources, (*(x.float() for x in (q, k, v, grad)), *results, *rest), strict=True))
    spec = spec_for(mask, head_dim=dim, head_dim_v=dim_v)
    backward = backward_spec(spec, call.values, (q_len, kv_len))
    sums = np.zeros((HEADS * padded, dims(backward)[0]), np.float32)
    for made, entry in backward_parts(backward, "sm90", (), hopper=True):
        if entry in (Entry.HOPPER, Entry.HOPPER_Q):
            kernel = lower_backward(made, entry, TARGETS["sm90"])
            tiles = kernel.plan.tiles
            by_keys = -(-kv_len // tiles.block_kv) * KV_HEADS
            programs = by_keys if entry is Entry.HOPPER else -(-q_len // tiles.block_q) * HEADS
            run_backward(
                kernel.source, _given(call, made, kernel, tensors, sums), programs, entry=entry.value
            )
    if not is_apart(backward):
        results[0] = torch.from_numpy(sums).view(1, HEADS, padded, -1)[:, :, :q_len, :dim] * call.scale
    for found, wanted in zip(results, expected, strict=True):
        assert np.abs(found.numpy() - wanted).max() < 0.015 * np.abs(wanted).max()
