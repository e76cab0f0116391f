"""Gradients where other systems give wrong numbers, NaN, or an error: those of the CPU's tests, on the GPU.

Every case is computed twice: a call that repeats another takes a way of its own, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch

import flexc
from flexc import build
from flexc.masks import causal
from tests.oracle import golden_gradients

DEVICE = "cuda"
BACKENDS = ["triton", "auto"]


def _leaves(
    heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """q, k, v of one batch."""
    shapes = [(heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, dim)]
    return [torch.randn(1, *shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


def _check(
    backend: str, leaves: Sequence[torch.Tensor], captured: Sequence[torch.Tensor] = (), **arguments: Any
) -> None:
    q, k, v = leaves
    for _ in range(2):
        out = flexc.attention(q, k, v, backend=backend, **arguments)
        grad = torch.randn(out.shape, device=DEVICE).to(out.dtype)
        actual = torch.autograd.grad(out, [*leaves, *captured], grad)
        golden_gradients(q, k, v, grad, captured=captured, **arguments).check(actual)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_distances_at_1025(backend: str) -> None:
    leaves = _leaves(2, 2, 1025, 1025)
    _check(backend, leaves, mask_mod=causal, score_mod=lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_a_tile_without_keys(backend: str) -> None:
    q, k, v = _leaves(4, 2, 300, 200)
    some = torch.rand(300, device=DEVICE) < 0.7
    some[128:256] = False

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return some[q_idx] & (kv_idx <= q_idx)

    _check(backend, (q, k, v), mask_mod=mask)
    out = flexc.attention(q, k, v, mask_mod=mask, backend=backend)
    (of_q,) = torch.autograd.grad(out, q, torch.randn_like(out))
    assert (of_q[:, :, ~some] == 0).all()
    assert (out[:, :, ~some] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_see_none_of_the_first_keys_that_their_tile_visits(backend: str, dim: int) -> None:
    _check(
        backend,
        _leaves(4, 2, 300, 500, dim),
        mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= q_idx + q_idx // 2,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_another_head_dimension_at_10000(backend: str) -> None:
    q, k, _ = _leaves(8, 4, 10_000, 10_000)
    v = torch.randn(1, 4, 10_000, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)

    for _ in range(2):
        out = flexc.attention(q, k, v, mask_mod=window, backend=backend)
        assert out.shape == (1, 8, 10_000, 128)
        grad = torch.zeros_like(out)
        grad[:, :, 9_900:] = torch.randn(1, 8, 100, 128, device=DEVICE)
        actual = torch.autograd.grad(out, (q, k, v), grad)
        tails = q[:, :, 9_900:], k[:, :, 9_861:], v[:, :, 9_861:]  # the last rows, and all keys that they see
        expected = golden_gradients(
            *tails,
            grad[:, :, 9_900:],
            mask_mod=lambda b, h, q_idx, kv_idx: window(b, h, q_idx + 9_900, kv_idx + 9_861),
        )
        expected.check([actual[0][:, :, 9_900:], *(x[:, :, 9_861:] for x in actual[1:])])
        assert all((x[:, :, :9_861] == 0).all() for x in actual)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_of_keys_after_all_of_them(backend: str) -> None:
    q, k, v = _leaves(2, 2, 100, 512)
    for _ in range(2):
        _check(backend, (q, k, v), mask_mod=causal)
        out = flexc.attention(q, k[:, :, :-128], v[:, :, :-128], mask_mod=causal, backend=backend)
        grad = torch.randn_like(out)
        actual = torch.autograd.grad(out, [q, k, v], grad)
        short_k, short_v = (x.detach()[:, :, :384] for x in (k, v))
        expected = golden_gradients(q, short_k, short_v, grad, mask_mod=causal)
        expected.check([actual[0], actual[1][:, :, :384], actual[2][:, :, :384]])
        assert all((x[:, :, 384:] == 0).all() for x in actual[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_of_a_score(backend: str) -> None:
    """Without dimensions; one tensor read at two indices; a bias that a layer made."""
    leaves = _leaves(2, 2, 130, 130)
    strength = torch.nn.Parameter(torch.tensor(0.7, device=DEVICE))
    _check(backend, leaves, [strength], score_mod=lambda s, b, h, q, kv: s * strength + strength * (q - kv))
    bias = torch.nn.Parameter(torch.randn(130, device=DEVICE))
    _check(backend, leaves, [bias], score_mod=lambda s, b, h, q, kv: s + bias[q] + bias[kv] * bias[h])
    layer = torch.nn.Linear(5, 2 * 130 * 130, device=DEVICE)
    table = layer(torch.randn(1, 5, device=DEVICE)).view(1, 2, 130, 130)
    _check_through(backend, leaves, table, [layer.weight, layer.bias])


def _check_through(
    backend: str, leaves: Sequence[torch.Tensor], table: torch.Tensor, wanted: Sequence[torch.Tensor]
) -> None:
    """Gradients of what a captured table was made of are those by its own gradient."""

    def score(table: torch.Tensor, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + table[b, h, q, kv]

    alone = table.detach().requires_grad_()
    _check(backend, leaves, [alone], score_mod=partial(score, alone))
    for _ in range(2):
        out = flexc.attention(*leaves, score_mod=partial(score, table), backend=backend)
        grads = torch.autograd.grad(out, [table, *wanted], torch.randn_like(out), retain_graph=True)
        expected = torch.autograd.grad(table, wanted, grads[0], retain_graph=True)
        for one, two in zip(grads[1:], expected, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_that_does_not_matter(backend: str) -> None:
    leaves = _leaves(2, 2, 130, 130)

    def constant(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx >= kv_idx, 0.0, -math.inf)

    for _ in range(2):
        out = flexc.attention(*leaves, score_mod=constant, backend=backend)
        of_q, of_k, of_v = torch.autograd.grad(out, leaves, torch.randn_like(out))
        assert (of_q == 0).all()
        assert (of_k == 0).all()
        assert (of_v != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_band_of_a_bias_and_a_product_of_vectors(backend: str) -> None:
    leaves = _leaves(4, 2, 160, 160)
    bias = torch.randn(1, 4, 160, 16, device=DEVICE, requires_grad=True)

    def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 16)

    _check(backend, leaves, [bias], mask_mod=band, score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, q - kv])
    a = torch.randn(1, 4, 160, 5, device=DEVICE, requires_grad=True)
    c = torch.randn(1, 2, 160, 5, device=DEVICE, requires_grad=True)
    dot = lambda s, b, h, q, kv: s + torch.dot(a[b, h, q], c[b, h // 2, kv])  # noqa: E731
    _check(backend, leaves, [a, c], mask_mod=causal, score_mod=dot)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_of_equal_elements(backend: str) -> None:
    leaves = _leaves(2, 2, 130, 130)
    table = torch.randint(0, 2, (130, 5), device=DEVICE).float().requires_grad_()
    _check(backend, leaves, [table], score_mod=lambda s, b, h, q, kv: s + table[kv].amax(-1) * (h + 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_twice(backend: str) -> None:
    leaves = _leaves(2, 1, 130, 130)
    slope = torch.tensor([0.1, 0.2], device=DEVICE, requires_grad=True)
    for _ in range(2):
        out = flexc.attention(
            *leaves,
            mask_mod=causal,
            score_mod=lambda s, b, h, q, kv: s + slope[h] * (kv - q),
            backend=backend,
            deterministic=True,
        )
        grad = torch.randn_like(out)
        first = torch.autograd.grad(out, [*leaves, slope], grad, retain_graph=True)
        second = torch.autograd.grad(out, [*leaves, slope], grad)
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str) -> None:
    q, k, v = _leaves(2, 2, 130, 130, dtype=torch.float32)
    for _ in range(2):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = flexc.attention(q, k.bfloat16(), v, mask_mod=causal, backend=backend)
        assert out.dtype is torch.bfloat16
        grad = torch.randn_like(out)
        actual = torch.autograd.grad(out, [q, k, v], grad)
        assert all(x.dtype is torch.float32 for x in actual)
        half_q, half_k, half_v = (x.detach().bfloat16() for x in (q, k, v))
        golden_gradients(half_q, half_k, half_v, grad, mask_mod=causal).check([x.bfloat16() for x in actual])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_some_inputs_are_those_of_all(backend: str) -> None:
    bias = torch.randn(4, 399, device=DEVICE)

    def biased(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + bias[h, q - kv + 199]

    inputs = [x.detach() for x in _leaves(4, 2, 200, 200)] + [bias]
    grad = torch.randn_like(inputs[0])

    def gradients(wanted: Sequence[int]) -> Sequence[torch.Tensor]:
        for n, x in enumerate(inputs):
            x.requires_grad_(n in wanted)
        out = flexc.attention(
            *inputs[:3], mask_mod=causal, score_mod=biased, deterministic=True, backend=backend
        )
        return torch.autograd.grad(out, [inputs[n] for n in wanted], grad)

    for _ in range(2):
        everything = gradients(range(4))
        for count in (1, 2, 3):
            for wanted in combinations(range(4), count):
                for n, found in zip(wanted, gradients(wanted), strict=True):
                    torch.testing.assert_close(found, everything[n], rtol=2e-2, atol=2e-2)


def _bound(table: torch.Tensor, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + table[h] * (kv - q)


MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "partial": lambda table: partial(_bound, table),
    "default": lambda table: lambda s, b, h, q, kv, t=table: s + t[h] * (kv - q),
    "closure": lambda table: lambda s, b, h, q, kv: s + table[h] * (kv - q),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", MAKERS)
def test_a_new_mod_at_each_step_compiles_nothing(form: str, backend: str) -> None:
    leaves = _leaves(2, 2, 130, 130)
    compilations = []
    for _ in range(4):
        slopes = torch.rand(2, device=DEVICE, requires_grad=True)
        _check(backend, leaves, [slopes], mask_mod=causal, score_mod=MAKERS[form](slopes))
        compilations.append(build.compilations)
    assert compilations[0] == compilations[-1]
