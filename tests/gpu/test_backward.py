"""Gradients on the GPU: every mod of the corpus against fp64, repeatability, and memory of long sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flexc
from flexc import backends, masks, scores
from tests.gradients import Problem, check_gradients, differentiable_slots, problem
from tests.mods import Entry, corpus
from tests.oracle import golden_gradients

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]


def _qkv(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, heads, q_len, dim, device="cuda").to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, dim, device="cuda").to(dtype) for _ in range(2))
    return q, k, v


def _gradients(given: Problem, names: tuple[str | int, ...]) -> Any:
    out, lse = backends.forward(given.call, "triton")
    assert lse is not None
    return backends.backward(given.call, "triton", out, lse, given.grad_out, given.grad_lse, frozenset(names))


def _check(*qkv: torch.Tensor, **arguments: Any) -> None:
    given = problem(*qkv, **arguments)
    names: tuple[str | int, ...] = ("q", "k", "v", *differentiable_slots(given.call))
    if given.call.sinks is not None:
        names = (*names, "sinks")
    check_gradients(given, _gradients(given, names), names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_mod(entry: Entry, dtype: torch.dtype) -> None:
    case = entry.make("cuda")
    qkv = _qkv(case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, 64, dtype)
    _check(*qkv, mask_mod=case.mask, score_mod=case.score)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_longer_with_groups_sinks_and_lse(dim: int, deterministic: bool) -> None:
    qkv = _qkv(2, 8, 2, 1111, 1111, dim, torch.bfloat16)
    bias = scores.relative_bias(torch.randn(8, 2221, device="cuda"))
    sinks = torch.randn(8, device="cuda")
    arguments = {"sinks": sinks, "with_lse": True, "deterministic": deterministic}
    _check(*qkv, mask_mod=masks.causal, score_mod=bias, **arguments)
    _check(*qkv, score_mod=scores.alibi(torch.rand(8, device="cuda")), **arguments)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1.0, 1.0, 1.0, 1.0), (6.0, 3.0, 1.0, 1e-8), (1e10, 1e-10, 1e6, 1e3)], ids=str
)
def test_single_precision_of_any_size(dim: int, fused: bool, sizes: tuple[float, ...]) -> None:
    q, k, v = _qkv(1, 4, 2, 1111, 1500, dim, torch.float32)
    given = problem(q * sizes[0], k * sizes[1], v * sizes[2], options={"backward_fused": fused})
    given = replace(given, grad_out=given.grad_out * sizes[3])
    check_gradients(given, _gradients(given, ("q", "k", "v")), ("q", "k", "v"))


def test_dropout() -> None:
    _check(*_qkv(2, 4, 2, 300, 300, 64, torch.float32), mask_mod=masks.causal, dropout_p=0.3, dropout_seed=5)


def test_the_same_bits_every_time() -> None:
    table = torch.randn(8, 4095, device="cuda")
    rows = torch.randn(2048, device="cuda")

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * rows[q_idx] + table[h, q_idx - kv_idx + 2047] + rows[(q_idx * kv_idx) % 2048]

    given = problem(
        *_qkv(2, 8, 2, 2048, 2048, 64, torch.bfloat16),
        mask_mod=masks.causal,
        score_mod=score,
        deterministic=True,
    )
    names: tuple[str | int, ...] = ("q", "k", "v", *differentiable_slots(given.call))
    first = _gradients(given, names)
    for _ in range(3):
        again = _gradients(given, names)
        for name in names:
            one, other = (
                g.values[name] if isinstance(name, int) else getattr(g, name) for g in (first, again)
            )
            assert torch.equal(one, other), name


def test_autograd_reaches_everything() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv(2, 4, 2, 200, 200, 64, torch.bfloat16))
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    out = flexc.attention(q, k, v, mask_mod=masks.causal, score_mod=scores.alibi(slopes))
    out.float().square().sum().backward()
    for x in (q, k, v, slopes):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_of_causal_attention_does_not_grow_with_its_square(deterministic: bool) -> None:
    """The scores alone would be 64 GB; the inputs are 96 MB, and so are their gradients."""
    length = 131_072
    q, k, v = (x.requires_grad_() for x in _qkv(1, 2, 2, length, length, 64, torch.bfloat16))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flexc.attention(q, k, v, mask_mod=masks.causal, deterministic=deterministic)
    out.sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert (x.grad != 0).any()
    assert v.grad is not None
    # The weights of each query sum to 1, and so do their gradients for every element of the values.
    sums = v.grad.double().sum(2)
    torch.testing.assert_close(sums, torch.full_like(sums, length), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_than_2_to_the_31_elements(deterministic: bool) -> None:
    """Keys and values (one tensor of 4.3 GB), sequence-major; queries see the last 500."""
    if torch.cuda.mem_get_info()[0] < 48 * 2**30:
        pytest.skip("needs 48 GiB of free memory")
    heads, dim, seen = 16, 128, 500
    length = 2**31 // (heads * dim) + 1000
    whole = torch.empty(1, length, heads, dim, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)
    q = torch.randn(1, heads, 70, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (whole.detach().requires_grad_() for _ in range(2))
    grad = torch.randn_like(q)

    def last(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= length - seen + q_idx

    out = flexc.attention(q, k, v, mask_mod=last, deterministic=deterministic)
    of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), grad)
    tail = whole[:, :, -seen:]
    expected = golden_gradients(q, tail, tail, grad, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= q_idx)
    expected.check((of_q, of_k[:, :, -seen:], of_v[:, :, -seen:]))
    for x in (of_k, of_v):
        for part in x[:, :, :-seen].split(1 << 16, dim=2):
            assert not part.any()


def test_memory_of_a_long_window_does_not_grow_with_its_square() -> None:
    length = 131_072
    q, k, v = (x.requires_grad_() for x in _qkv(1, 2, 1, length, length, 64, torch.bfloat16))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flexc.attention(q, k, v, mask_mod=masks.sliding_window(1024))
    out.sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
    assert q.grad is not None
    assert q.grad.isfinite().all()
