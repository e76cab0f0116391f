"""Few query rows: which calls get tiles of several heads, what these kernels are, and what explain says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flexc
from flexc import build, choice, gpu, masks, scores
from flexc.build import kernel_for
from flexc.call import PLAIN, AttentionCall
from flexc.callspec import spec_of
from flexc.codegen.arguments import MAP_ARGUMENTS
from flexc.codegen.design import Design
from flexc.codegen.few_rows import for_few_rows
from flexc.direct import check_fits, check_map_fits
from flexc.errors import BlockMaskMismatch, ShapeMismatch
from flexc.ir.spec import AttentionSpec
from flexc.resolve import resolve
from tests.codegen.generate import spec_for


def _by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < h * 10


def _call(q_len: int, heads: int = 8, kv_heads: int = 1, batch: int = 2, **changes: Any) -> AttentionCall:
    q, k = (torch.zeros(batch, h, n, 64).bfloat16() for h, n in ((heads, q_len), (kv_heads, 300)))
    call = AttentionCall(
        q=q, k=k, v=k, mods=PLAIN, values=(), block_map=None, scale=0.1, sinks=None, return_lse=False,
        out=None, allow_tf32=False,
    )  # fmt: skip
    return replace(call, **changes)


def _suited(
    q_len: int, heads: int = 8, kv_heads: int = 1, backend: str = "auto", **changes: Any
) -> tuple[Design, AttentionSpec]:
    call = _call(q_len, heads, kv_heads, **changes)
    return choice.design_for(call, spec_of(call), "sm90", backend)


def _spec(q_len: int, heads: int = 8, kv_heads: int = 1, **changes: Any) -> AttentionSpec:
    design, spec = _suited(q_len, heads, kv_heads, "triton", **changes)
    assert design is Design.PORTABLE
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
    spec = _spec(q_len, heads, kv_heads)
    assert (spec.few_rows, spec.packed_heads) == (rows, packed)


@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads", "rows", "packed"),
    [
        (3, 8, 1, 8, 8),
        (8, 8, 1, 8, 8),
        (9, 8, 1, 16, 8),
        (63, 8, 1, 16, 8),
        (64, 8, 1, 16, 8),
        (3, 12, 2, 8, 8),
        (20, 6, 2, 32, 4),
        (100, 32, 8, 0, 1),
        (200, 32, 8, 0, 1),
        (1, 64, 1, 1, 64),
        (2, 64, 1, 2, 64),
        (1000, 8, 1, 0, 1),
        (200, 65, 1, 0, 1),
    ],
)
def test_tiles_of_hopper_for_few_rows(q_len: int, heads: int, kv_heads: int, rows: int, packed: int) -> None:
    for backend in ("auto", "hopper"):
        design, spec = _suited(q_len, heads, kv_heads, backend, batch=80)
        assert design is Design.HOPPER
        assert (spec.few_rows, spec.packed_heads) == (rows, packed)
        _, alone = _suited(q_len, heads, kv_heads, backend, batch=1)
        assert alone.few_rows in (0, 64 // packed)


@pytest.mark.parametrize(("q_len", "head_dim"), [(1, 64), (2, 128), (8, 192)])
def test_the_portable_kernel_stays_where_it_was_not_outdone(q_len: int, head_dim: int) -> None:
    spec = spec_for(head_dim=head_dim)
    assert choice.design_named("auto", spec, "sm90", (), (q_len, 8, 1))[0] is Design.PORTABLE
    design, packed = choice.design_named("hopper", spec, "sm90", (), (q_len, 8, 1))
    assert design is Design.HOPPER
    assert packed.packed_heads == 8


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (65, 1)])
def test_few_rows_that_fill_no_tile_take_the_portable_kernel(heads: int, kv_heads: int) -> None:
    design, spec = _suited(20, heads, kv_heads)
    assert design is Design.PORTABLE
    assert spec.few_rows
    assert _suited(20, heads, kv_heads, "hopper")[1].few_rows == 0


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16, 64, 100])
def test_few_rows_take_at_most_two_kernels(group: int) -> None:
    for dims in (64, 256):
        spec = spec_for(head_dim=dims)
        assert len({for_few_rows(spec, q_len, group, 1, {}) for q_len in range(1, 64)}) <= 2


def test_heads_that_see_different_keys_have_tiles_of_their_own() -> None:
    def bias_by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + h

    assert _spec(1, mods=resolve(None, _by_head)[0]).packed_heads == 1
    assert _spec(1, mods=resolve(bias_by_head, masks.causal)[0]).packed_heads == 8
    for mask, packed in ((masks.causal, 8), (_by_head, 1)):
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


def test_what_tiles_of_several_heads_can_not_have() -> None:
    def of_key_and_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, kv_idx]

    table = torch.ones(8, 300)
    for score, mask in ((of_key_and_head, None), (None, _by_head)):
        mods, values, _ = resolve(score, mask)
        design, spec = _suited(4, mods=mods, values=values)
        assert design is Design.PORTABLE
        assert spec.few_rows
    assert _suited(4, dropout_p=0.1)[0] is Design.PORTABLE
    slopes = resolve(scores.alibi(torch.ones(8)), masks.causal)
    assert _suited(4, mods=slopes[0], values=slopes[1])[1].packed_heads == 8
    small = flexc.create_block_mask(masks.causal, None, None, 20, 300, device="cpu", BLOCK_SIZE=16)
    assert _suited(20, 2, 1, block_map=small.block_map)[0] is Design.PORTABLE  # 32 rows of a head


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16, 64, 100])
def test_lengths_with_kernels_of_their_own(group: int) -> None:
    spec = spec_for(masks.causal, head_dim=64)
    found = choice.few_lengths("auto", spec, "sm90", (), group)
    made = {choice.design_named("auto", spec, "sm90", (), (n, group, 1)) for n in found}
    assert len(made) == len(found) <= 3
    for q_len in range(1, 600):
        suited = choice.design_named("auto", spec, "sm90", (), (q_len, group, 1))
        assert suited in made or not suited[1].few_rows


@pytest.mark.parametrize("backend", ["auto", "triton", "hopper"])
def test_a_loaded_kernel_serves_few_rows_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    call = _call(5)
    wanted = choice.design_for(call, spec_of(call), "sm90", backend)
    assert gpu.served_by(call, "sm90", backend) == wanted
    usual = flexc.compile(head_dim=64, backend=backend)
    build.register(usual)
    compiled = build.compilations
    design, spec = gpu.served_by(call, "sm90", backend)
    assert (design is Design.PORTABLE) == (backend == "triton")
    assert spec.few_rows == 0
    assert kernel_for(spec, "sm90", (), (), design).artifact.key == usual.artifact.key
    build.register(flexc.compile(head_dim=64, backend=backend, q_len=8, group=8))
    design, spec = gpu.served_by(call, "sm90", backend)
    assert (design, spec) == wanted
    assert kernel_for(spec, "sm90", (), (), design).artifact.packed_heads == 8
    assert build.compilations <= compiled + 1  # the one that was loaded


def test_a_loaded_kernel_serves_narrow_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    window = masks.sliding_window(128)
    mods, values, _ = resolve(None, window)
    q = torch.zeros(1, 2, 500, 128).bfloat16()
    call = _call(500, mods=mods, values=values, q=q, k=q, v=q)
    assert gpu.served_by(call, "sm90", "auto")[1].narrow
    assert not gpu.served_by(replace(call, values=(1000,)), "sm90", "auto")[1].narrow
    usual = flexc.compile(mask_mod=window, head_dim=128)
    build.register(usual)
    design, spec = gpu.served_by(call, "sm90", "auto")
    assert kernel_for(spec, "sm90", (), (), design).artifact.key == usual.artifact.key


def test_a_loaded_kernel_serves_caps_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    mods, values, _ = resolve(scores.softcap(30.0), masks.causal)
    call = _call(2000, mods=mods, values=values)
    special = spec_of(call)
    assert special.bounded
    assert gpu.served_by(call, "sm90", "auto") == (Design.HOPPER, special)
    ahead = flexc.compile(score_mod=scores.softcap(30.0), mask_mod=masks.causal, head_dim=64)
    build.register(ahead)
    design, spec = gpu.served_by(call, "sm90", "auto")
    assert not spec.bounded
    assert kernel_for(spec, "sm90", (), (), design).artifact.key == ahead.artifact.key


@pytest.mark.parametrize(("q_len", "group"), [(0, 1), (4, 0), ("4", 1)])
def test_a_number_of_rows_is_a_number(q_len: Any, group: int) -> None:
    with pytest.raises(ShapeMismatch, match=r"is (0|'4')"):
        flexc.compile(head_dim=64, q_len=q_len, group=group)


def test_a_kernel_of_several_heads_takes_no_more() -> None:
    kernel = flexc.compile(head_dim=64, q_len=4, group=4)
    q, k = torch.zeros(1, 8, 4, 64).bfloat16(), torch.zeros(1, 1, 100, 64).bfloat16()
    check_fits(kernel.artifact, q[:, :4], k, k, None)
    with pytest.raises(ShapeMismatch, match="up to 4 query heads that share keys; q has 8"):
        check_fits(kernel.artifact, q, k, k, None)
    blocks = flexc.create_block_mask(_by_head, None, 4, 4, 100, device="cpu", BLOCK_SIZE=128).block_map
    walking = replace(kernel.artifact, arguments=(*kernel.artifact.arguments, *MAP_ARGUMENTS))
    with pytest.raises(BlockMaskMismatch, match="heads of the block mask differ"):
        check_map_fits(walking, q[:, :4], k, blocks)
