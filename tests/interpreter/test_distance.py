"""Biases by distance as kernels read them, and their gradients as kernels add them up: against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores
from flexc.gpu import run
from flexc.gpu_backward import backward
from tests.gradients import check_gradients, differentiable_slots, problem
from tests.oracle import golden

Mod = Callable[..., Any]
TILES = [(32, 32), (16, 64), (64, 16), (64, 64), (128, 32)]
"""Squares, and tiles wider one way or the other: with parts of 16 and of 32, and strips of one to four."""


def _options(block_q: int, block_kv: int) -> dict[str, object]:
    tiles = {"block_q": block_q, "block_kv": block_kv, "num_warps": 4, "num_stages": 1}
    return {**tiles, **{f"backward_{name}": value for name, value in tiles.items()}}


def _qkv(
    q_len: int, kv_len: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(1, 2, q_len, 16)
    k, v = torch.randn(2, 1, 1, kv_len, 16)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Mod, **facts: Any) -> None:
    given = problem(q, k, v, score_mod=score, **facts)
    out, lse = run(given.call)
    assert lse is not None
    mods = {name: facts[name] for name in ("mask_mod",) if name in facts}
    golden(q, k, v, score_mod=score, **mods).check(out, lse)
    names: tuple[str | int, ...] = ("q", "k", "v", *differentiable_slots(given.call))
    found = backward(given.call, out, lse, given.grad_out, given.grad_lse, frozenset(names))
    check_gradients(given, found, names)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_tiles_of_any_shape(tiles: tuple[int, int]) -> None:
    _check(*_qkv(75, 90), scores.relative_bias(torch.randn(2, 179)), options=_options(*tiles))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 40), (40, 1), (33, 65), (64, 64)])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["every_pair", "causal"])
def test_lengths_that_hang_over(q_len: int, kv_len: int, mask: Any) -> None:
    bias = scores.relative_bias(torch.randn(2, 2 * max(q_len, kv_len) - 1))
    _check(*_qkv(q_len, kv_len), bias, mask_mod=mask, options=_options(32, 32))


def test_distances_that_share_an_element() -> None:
    bias, half = scores.relative_bias(torch.randn(2, 9)), torch.float16
    _check(*_qkv(70, 70, half), bias, options=_options(32, 32))
    _check(*_qkv(70, 70, half), bias, mask_mod=masks.causal, deterministic=True, options=_options(32, 32))


def test_an_index_out_of_range_reads_nothing_and_has_no_gradient() -> None:
    table = torch.randn(2, 60)

    def near(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + table[h, q_idx - kv_idx]

    def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < 60) & (kv_idx - q_idx <= 60)

    _check(*_qkv(80, 80), near, mask_mod=band, options=_options(32, 32))


def test_a_bias_in_the_middle_of_other_arithmetic() -> None:
    table, gain, buckets = torch.randn(2, 8), torch.rand(2), torch.randint(0, 8, (70,))

    def capped(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bias = table[h, buckets[(q_idx - kv_idx).abs()]]
        return 5.0 * torch.tanh((s + gain[h] * bias) / 5.0)

    _check(*_qkv(70, 70), capped, options=_options(32, 32))
    _check(*_qkv(70, 70), capped, mask_mod=masks.sliding_window(20), options=_options(32, 32))


def test_minus_infinity_hides_a_distance() -> None:
    table = torch.randn(2, 139)
    table[:, 80:] = float("-inf")
    _check(*_qkv(70, 70), scores.relative_bias(table), options=_options(32, 32))


def test_a_bias_that_is_the_whole_score() -> None:
    table = torch.randn(2, 139)

    def alone(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[h, q_idx - kv_idx + 69]

    _check(*_qkv(70, 70), alone, options=_options(32, 32))


@pytest.mark.parametrize("fused", [True, False])
def test_without_a_gradient_of_its_own(fused: bool) -> None:
    q, k, v = _qkv(70, 80)
    options = {**_options(32, 32), "backward_fused": fused}
    given = problem(q, k, v, score_mod=scores.relative_bias(torch.randn(2, 159)), options=options)
    out, lse = run(given.call)
    assert lse is not None
    found = backward(given.call, out, lse, given.grad_out, None, frozenset(("q", "k", "v")))
    check_gradients(given, found, ("q", "k", "v"))


def test_rows_of_several_heads_in_one_tile() -> None:
    bias = scores.relative_bias(torch.randn(2, 99))
    q, k, v = _qkv(3, 50)
    with torch.no_grad():
        result = flexc.attention(q, k, v, score_mod=bias, return_lse=True, backend="triton")
    golden(q, k, v, score_mod=bias).check(*result)


def _buckets(table: torch.Tensor) -> Mod:
    """T5's: near distances have a bucket each, far ones share few, on a logarithmic scale."""

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = kv_idx - q_idx
        near = distance.abs()
        far = 4 + (torch.log((near.float() / 4).clamp(min=1.0)) / math.log(8) * 4).long()
        bucket = torch.where(near < 4, near, far.clamp(max=7))
        return s + table[bucket + torch.where(distance > 0, 8, 0), h]

    return score


@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.float32, True), (torch.float16, False)])
def test_buckets(dtype: torch.dtype, deterministic: bool) -> None:
    bias = _buckets(torch.randn(16, 2))
    _check(*_qkv(70, 40, dtype), bias, deterministic=deterministic, options=_options(32, 32))


def test_a_table_of_each_batch() -> None:
    bias = torch.randn(2, 2, 119)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + bias[b, h, q_idx - kv_idx + 69]

    q, k, v = (torch.cat((x, x + 0.5)) for x in _qkv(50, 70))
    _check(q, k, v, score, options=_options(32, 32))


def test_what_is_hidden_reaches_no_other_diagonal() -> None:
    given = _qkv(40, 50)
    given[2][:, :, 45:] = float("nan")
    bias = torch.randn(2, 99)
    call = problem(
        *given, score_mod=scores.relative_bias(bias), mask_mod=masks.causal, options=_options(32, 32)
    )
    out, lse = run(call.call)
    assert lse is not None
    slots = differentiable_slots(call.call)
    found = backward(call.call, out, lse, call.grad_out, None, frozenset(slots)).values[slots[0]]
    assert found is not None
    assert found.isfinite().all()
