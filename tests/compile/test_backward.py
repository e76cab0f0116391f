"""The kernels of a backward compile for three generations, without a GPU and with few spilled registers.

A part of the corpus: what their graphs are made of differs, and the forward's tests compile all of it. In
one of four forms in turn; in all of them with `--whole-corpus`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores

BIAS = torch.zeros(8, 255, requires_grad=True)
SLOPES = torch.zeros(8, requires_grad=True)
MODS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "plain": (None, None),
    "causal": (masks.causal, None),
    "documents": (masks.document(torch.zeros(64, dtype=torch.int32)), None),
    "softcap": (masks.sliding_window(64), scores.softcap(30.0)),
    "slopes": (masks.causal, scores.alibi(SLOPES)),
    "bias": (None, scores.relative_bias(BIAS)),
}
MATRIX_INSTRUCTION = {"sm80": "mma.sync", "sm90": "wgmma.mma_async", "sm100": "tcgen05.mma"}
CAPTURING = {"slopes", "bias"}
"""Whose captured tensors want gradients: these come from a kernel by keys, and dQ from one of its own."""
FUSED, APART = {"attention_backward_fused"}, {"attention_backward_kv", "attention_backward_q"}
"""The kernels with matrix products."""
MOST_SPILLS = 512


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every mod for every target, in one kernel or in two, at one of two head dimensions; or all of it."""
    if metafunc.function is not test_compiles:
        return
    whole = metafunc.config.getoption("--whole-corpus")
    variants = ((64, True), (128, False), (128, True), (64, False))
    metafunc.parametrize(
        ("name", "target", "head_dim", "fused"),
        [
            (name, target, *variant)
            for n, (name, target) in enumerate(product(MODS, MATRIX_INSTRUCTION))
            for v, variant in enumerate(variants)
            if whole or n % len(variants) == v
        ],
    )


def test_compiles(name: str, target: str, head_dim: int, fused: bool) -> None:
    mask, score = MODS[name]
    kernel = flexc.compile(
        mask_mod=mask,
        score_mod=score,
        head_dim=head_dim,
        target=target,
        backward=True,
        backend="triton",
        options={"backward_fused": fused},
    )
    multiply = FUSED if fused and name not in CAPTURING else APART
    assert multiply <= set(kernel.ptx)
    for entry in multiply:
        assert MATRIX_INSTRUCTION[target] in kernel.ptx[entry]
        assert kernel.resources[entry].spills <= MOST_SPILLS, kernel.explain()


def test_a_bias_by_distance_is_read_once_a_distance_not_once_a_pair() -> None:
    tiles = {"block_q": 64, "block_kv": 64, "num_warps": 4, "num_stages": 2}
    same_tiles = {**tiles, **{f"backward_{name}": value for name, value in tiles.items()}}

    def reads(score: Any) -> dict[str, int]:
        kernel = flexc.compile(
            score_mod=score, head_dim=64, target="sm90", backward=True, backend="triton", options=same_tiles
        )
        names = (*APART, "attention_forward")
        return {name: len(re.findall(r"ld\.global|cp\.async\.c[ag]", kernel.ptx[name])) for name in names}

    without, biased = reads(None), reads(scores.relative_bias(BIAS))
    for name, count in without.items():  # a thread has 32 pairs of a tile, and at most two of its distances
        assert biased[name] - count < 16, name


def test_single_precision_is_no_empty_kernel_where_split_operands_are() -> None:
    kernel = flexc.compile(head_dim=64, dtype=torch.float32, target="sm100", backward=True)
    assert all("st.global" in ptx for ptx in kernel.ptx.values())


@pytest.mark.parametrize("fused", [False, True])
def test_single_precision_takes_fp16_products_alone(fused: bool) -> None:
    kernel = flexc.compile(
        head_dim=64,
        dtype=torch.float32,
        target="sm90",
        backward=True,
        options={"backward_fused": fused},
    )
    for entry in FUSED if fused else APART:
        products = re.findall(r"wgmma\.mma_async\S*", kernel.ptx[entry])
        assert products
        assert all(".f32.f16.f16" in product for product in products)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "target"),
    [
        (256, torch.bfloat16, "sm86"),
        (128, torch.float32, "sm90"),
        (512, torch.bfloat16, "sm90"),
        (512, torch.float32, "sm86"),
        pytest.param(256, torch.bfloat16, "sm90", marks=pytest.mark.whole),
        pytest.param(128, torch.float32, "sm86", marks=pytest.mark.whole),
        pytest.param(512, torch.bfloat16, "sm86", marks=pytest.mark.whole),
        pytest.param(512, torch.float32, "sm90", marks=pytest.mark.whole),
    ],
)
def test_wide_heads_and_single_precision_fit(head_dim: int, dtype: torch.dtype, target: str) -> None:
    kernel = flexc.compile(
        mask_mod=masks.causal, head_dim=head_dim, dtype=dtype, target=target, backward=True, backend="triton"
    )
    if (head_dim, dtype) == (512, torch.float32):
        spills = {entry: r.spills for entry, r in kernel.resources.items() if "backward" in entry}
        assert max(spills.values()) <= MOST_SPILLS, spills
    limit = {"sm86": 99, "sm90": 227}[target] * 1024
    assert all(r.shared_memory <= limit for r in kernel.resources.values())
