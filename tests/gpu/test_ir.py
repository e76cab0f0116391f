"""Graphs and block maps on GPU tensors give what they give on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.blockmap import build_block_map
from flexc.ir.build import binary, compare, input_, load, logic
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType
from tests.ir.expressions import BATCH, HEADS, KV_LEN, Q_LEN, booleans, capture_values, full_grid, integers


def on(device: str) -> list[object]:
    return [torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for v in capture_values(0)]


@settings(max_examples=100, deadline=None)
@given(root=st.one_of(booleans(3), integers(3)))
def test_evaluation(root: Expr) -> None:
    results = []
    for device in ("cpu", "cuda"):
        inputs = {name: index.to(device) for name, index in full_grid(torch).items()}
        results.append(evaluate(root, Env(inputs, on(device), torch, torch.float64)).cpu())
    assert results[0].dtype == results[1].dtype
    if not any(node.dtype is DType.F32 for node in topological(root)):  # else by the last place
        # A condition that is a number picks a branch of whatever shape; a tensor spreads both.
        torch.testing.assert_close(*torch.broadcast_tensors(*results), rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(mask=booleans(3))
def test_block_map(mask: Expr) -> None:
    maps = [
        build_block_map(
            mask, on(device), q_len=Q_LEN, kv_len=KV_LEN, batch=BATCH, heads=HEADS,
            block_q=4, block_kv=4, xp=torch, device=device,
        )
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    assert maps[1].runs.is_cuda
    torch.testing.assert_close(maps[1].runs.cpu(), maps[0].runs)
    torch.testing.assert_close(maps[1].offsets.cpu(), maps[0].offsets)
    torch.testing.assert_close(maps[1].transpose().runs.cpu(), maps[0].transpose().runs)


@pytest.mark.parametrize("length", [8192, 131072])
def test_documents(length: int) -> None:
    q, kv = input_(Input.Q_IDX), input_(Input.KV_IDX)
    same = compare(Op.EQ, load(0, (q,), DType.I32), load(0, (kv,), DType.I32))
    near = compare(Op.LE, binary(Op.SUB, q, kv), load(1, (q,), DType.I32))
    mask = logic(Op.AND, logic(Op.AND, same, compare(Op.LE, kv, q)), near)
    rng = np.random.default_rng(0)
    values = [np.sort(rng.integers(0, 40, length)).astype(np.int32), np.full(length, 3000, np.int32)]
    sizes = {"q_len": length, "kv_len": length, "batch": 1, "heads": 1, "block_q": 128, "block_kv": 64}
    expected = build_block_map(mask, values, **sizes)
    tensors = [torch.from_numpy(v).cuda() for v in values]
    got = build_block_map(mask, tensors, xp=torch, device="cuda", **sizes)
    np.testing.assert_array_equal(got.runs.cpu().numpy(), expected.runs)
