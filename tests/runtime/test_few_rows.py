"""Few query rows: which calls get tiles of several heads, what these kernels are, and what explain says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flexc
from flexc import build, choice, masks, scores
from flexc.build import kernel_for
from flexc.call import PLAIN, AttentionCall
from flexc.callspec import spec_of
from flexc.codegen.design import Design
from flexc.codegen.few_rows import for_few_rows
from flexc.ir.spec import AttentionSpec
from flexc.resolve import resolve
from tests.codegen.generate import spec_for


def _spec(
    q_len: int, heads: int = 8, kv_heads: int = 1, backend: str = "auto", **changes: Any
) -> AttentionSpec:
    q, k = torch.zeros(2, heads, q_len, 64).bfloat16(), torch.zeros(2, kv_heads, 300, 64).bfloat16()
    call = AttentionCall(
        q=q, k=k, v=k, mods=PLAIN, values=(), block_map=None, scale=0.1, sinks=None, return_lse=False,
        out=None, allow_tf32=False,
    )  # fmt: skip
    call = replace(call, **changes)
    design, spec = choice.design_for(call, spec_of(call), "sm90", backend)
    assert (design is Design.HOPPER) == (q_len >= 64 and backend == "auto")
    return spec


@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads", "rows", "packed"),
    [
        (1, 8, 1, 2, 8),
        (1, 32, 32, 16, 1),
        (2, 8, 1, 2, 8),
        (3, 8, 1, 8, 8),
        (63, 8, 1, 8, 8),
        (1, 12, 2, 2, 8),
        (40, 8, 8, 64, 1),
        (1, 64, 1, 1, 64),
        (1, 65, 1, 16, 1),
        (64, 8, 1, 0, 1),
        (1000, 8, 1, 0, 1),
    ],
)
def test_tiles_for_few_rows(q_len: int, heads: int, kv_heads: int, rows: int, packed: int) -> None:
    for backend in ("auto", "triton"):
        spec = _spec(q_len, heads, kv_heads, backend)
        assert (spec.few_rows, spec.packed_heads) == (rows, packed)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16, 64, 100])
def test_few_rows_take_at_most_two_kernels(group: int) -> None:
    for dims in (64, 256):
        spec = spec_for(head_dim=dims)
        assert len({for_few_rows(spec, q_len, group, 1, {}) for q_len in range(1, 64)}) <= 2


def test_heads_that_see_different_keys_have_tiles_of_their_own() -> None:
    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < h * 10

    def bias_by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + h

    assert _spec(1, mods=resolve(None, by_head)[0]).packed_heads == 1
    assert _spec(1, mods=resolve(bias_by_head, masks.causal)[0]).packed_heads == 8
    for mask, packed in ((masks.causal, 8), (by_head, 1)):
        blocks = flexc.create_block_mask(mask, None, 8, 1, 300, device="cpu")
        assert _spec(1, block_map=blocks.block_map).packed_heads == packed
        assert _spec(63, 1, block_map=blocks.block_map).few_rows == 64
    small = flexc.create_block_mask(masks.causal, None, None, 63, 300, device="cpu", BLOCK_SIZE=16)
    assert _spec(63, 1, block_map=small.block_map).few_rows == 16
    asked = _spec(1, options=(("block_q", 32),))
    assert (asked.few_rows, asked.packed_heads) == (0, 1)


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm120"])
@pytest.mark.parametrize(("head_dim", "rows", "heads"), [(128, 2, 8), (64, 8, 8), (256, 4, 8)])
def test_kernels_for_few_rows(target: str, head_dim: int, rows: int, heads: int) -> None:
    spec = spec_for(
        masks.causal, scores.alibi(torch.ones(8)), head_dim=head_dim, return_lse=True, few_rows=rows,
        packed_heads=heads,
    )  # fmt: skip
    kernel = kernel_for(spec, target)
    assert kernel.artifact.block_q == rows
    assert kernel.artifact.packed_heads == heads
    assert kernel.resources["attention_forward"].spills == 0
    assert f"packed_heads = {heads}: few rows: a tile holds {rows} of each head" in kernel.explain()
    if target == "sm90":
        assert "design = portable: few rows" in kernel.explain()


def test_a_loaded_kernel_serves_few_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = spec_for(head_dim=64)
    monkeypatch.setattr(build, "_loaded", {})
    assert not build.is_loaded(usual, "sm90")
    kernel = kernel_for(usual, "sm90")
    build.register(kernel)
    assert build.is_loaded(usual, "sm90")
    assert not build.is_loaded(replace(usual, few_rows=2, packed_heads=8), "sm90")
