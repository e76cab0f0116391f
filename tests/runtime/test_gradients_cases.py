"""Gradients on the CPU where other systems give wrong numbers, NaN, or an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flexc
from tests.oracle import golden_gradients


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _leaves(
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k, v of one batch."""
    shapes = [(heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, dim_v)]
    return [torch.randn(1, *shape).to(dtype).requires_grad_() for shape in shapes]


def _check(leaves: Sequence[torch.Tensor], captured: Sequence[torch.Tensor] = (), **arguments: Any) -> None:
    """Gradients of q, k, v and the captured tensors, as near to fp64 as plain PyTorch's."""
    q, k, v = leaves
    out = flexc.attention(q, k, v, backend="cpu", **arguments)
    grad = torch.randn(out.shape).to(out.dtype)
    actual = torch.autograd.grad(out, [*leaves, *captured], grad)
    golden_gradients(q, k, v, grad, captured=captured, **arguments).check(actual)


def test_a_bias_of_distances_at_1025() -> None:
    leaves = _leaves(2, 2, 1025, 1025, 64, 64, torch.bfloat16)
    _check(leaves, mask_mod=causal, score_mod=lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_without_keys(with_sinks: bool) -> None:
    """Anywhere in a tile, and a whole tile of them."""
    leaves = _leaves(4, 2, 300, 200, 16, 16)
    some = torch.rand(300) < 0.7
    some[128:256] = False
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return some[q_idx] & (kv_idx <= q_idx)

    out = flexc.attention(*leaves, mask_mod=mask, sinks=sinks, backend="cpu")
    grad = torch.randn(out.shape)
    wanted = [*leaves, *([] if sinks is None else [sinks])]
    actual = torch.autograd.grad(out, wanted, grad)
    q, k, v = leaves
    golden_gradients(q, k, v, grad, mask_mod=mask, sinks=sinks).check(actual)
    assert (actual[0][:, :, ~some] == 0).all()
    assert (actual[0][:, :, some] != 0).any()


def test_no_row_has_a_key() -> None:
    leaves = _leaves(2, 2, 40, 40, 16, 16)
    out, lse = flexc.attention(
        *leaves, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0, return_lse=True, backend="cpu"
    )
    assert (lse == -math.inf).all()
    grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert all((grad == 0).all() for grad in grads)


def test_a_slice_of_keys_after_all_of_them() -> None:
    q, k, v = _leaves(2, 2, 100, 512, 16, 16)
    _check((q, k, v), mask_mod=causal)
    out = flexc.attention(q, k[:, :, :-128], v[:, :, :-128], mask_mod=causal, backend="cpu")
    grad = torch.randn(out.shape)
    actual = torch.autograd.grad(out, [q, k, v], grad)
    short_k, short_v = (x.detach()[:, :, :384] for x in (k, v))
    expected = golden_gradients(q, short_k, short_v, grad, mask_mod=causal)
    expected.check([actual[0], actual[1][:, :, :384], actual[2][:, :, :384]])
    assert all((x[:, :, 384:] == 0).all() for x in actual[1:])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_no_row_sees_changes_no_gradient(poison: float) -> None:
    clean = [x.detach() for x in _leaves(4, 2, 150, 200, 16, 16)]
    seen = torch.ones(200, dtype=torch.bool)
    seen[[3, 64, 65, 130]] = False
    seen[150:] = False
    scale = torch.tensor(1.25, requires_grad=True)

    def some_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return seen[kv_idx] & (q_idx >= kv_idx)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale + (q_idx - kv_idx + 1).log() * scale

    grad = torch.randn(1, 4, 150, 16)

    def gradients(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = flexc.attention(*leaves, mask_mod=some_keys, score_mod=scaled, backend="cpu")
        return torch.autograd.grad(out, [*leaves, scale], grad)

    expected = gradients(clean)
    q, k, v = (x.clone() for x in clean)
    k[:, :, ~seen] = poison
    v[:, :, ~seen] = poison
    for actual, wanted in zip(gradients((q, k, v)), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_row_that_is_nan_spoils_only_what_it_sees() -> None:
    q, k, v = (x.detach() for x in _leaves(2, 1, 150, 150, 16, 16))
    grad = torch.randn(1, 2, 150, 16)

    def gradients(q: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(flexc.attention(*leaves, mask_mod=causal, backend="cpu"), leaves, grad)

    expected = gradients(q, grad)
    bad_q, bad_grad = q.clone(), grad.clone()
    bad_q[:, :, 100] = math.nan
    bad_grad[:, :, 90] = math.nan
    for actual, bad in ((gradients(bad_q, grad), 100), (gradients(q, bad_grad), 90)):
        rows = torch.arange(150) != bad
        torch.testing.assert_close(actual[0][:, :, rows], expected[0][:, :, rows])
        for one, two in zip(actual[1:], expected[1:], strict=True):
            torch.testing.assert_close(one[:, :, bad + 1 :], two[:, :, bad + 1 :])
            assert one[:, :, : bad + 1].isnan().all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_gradient_of_an_lse_without_keys_changes_nothing(bad: float, backend: str) -> None:
    """Merging two states that are both empty in a row gives such a gradient: of a logarithm of 0."""
    leaves = _leaves(2, 1, 150, 150, 16, 16)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx % 3 != 1) & (q_idx >= kv_idx)

    grads = [torch.randn(1, 2, 150, 16), torch.randn(1, 2, 150)]
    results = flexc.attention(*leaves, mask_mod=mask, return_lse=True, backend=backend)
    expected = torch.autograd.grad(results, leaves, grads, retain_graph=True)
    grads[1][:, :, 1::3] = bad
    for actual, wanted in zip(torch.autograd.grad(results, leaves, grads), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_merged_states_train_as_one(backend: str) -> None:
    """Attention to two parts of the keys, joined by their lse, has the gradients of attention to all."""
    q, k, v = _leaves(4, 2, 150, 230, 16, 16)
    sinks = torch.randn(4, requires_grad=True)
    (out, lse), (other_out, other_lse) = (
        flexc.attention(
            q,
            k[:, :, keys],
            v[:, :, keys],
            mask_mod=lambda b, h, q_idx, kv_idx, start=keys.start: q_idx >= kv_idx + start,
            sinks=sinks if keys.start == 0 else None,
            return_lse=True,
            backend=backend,
        )
        for keys in (slice(0, 90), slice(90, 230))  # the second is empty for the first rows
    )
    merged_lse = torch.logaddexp(lse, other_lse)
    merged = out * (lse - merged_lse).exp()[..., None] + other_out * (other_lse - merged_lse).exp()[..., None]
    grad, grad_lse = torch.randn(merged.shape), torch.randn(merged_lse.shape)
    actual = torch.autograd.grad([merged, merged_lse], [q, k, v, sinks], [grad, grad_lse])
    expected = golden_gradients(q, k, v, grad, grad_lse, sinks=sinks, mask_mod=causal)
    for one, two in zip(actual, expected.golden, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-4)


def test_parameters_of_a_score() -> None:
    """Without dimensions; one tensor read at two indices; a bias that a layer made."""
    leaves = _leaves(2, 2, 70, 70, 16, 16)
    strength = torch.nn.Parameter(torch.tensor(0.7))
    _check(leaves, [strength], score_mod=lambda s, b, h, q_idx, kv_idx: s * strength + strength)
    bias = torch.nn.Parameter(torch.randn(70))
    _check(leaves, [bias], score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[q_idx] + bias[kv_idx] * bias[h])
    layer = torch.nn.Linear(5, 2 * 70 * 70)
    features = torch.randn(1, 5)

    def made(dtype: torch.dtype) -> torch.Tensor:
        bias: torch.Tensor = layer.to(dtype)(features.to(dtype))
        return bias.view(1, 2, 70, 70)

    table = made(torch.float32)
    out = flexc.attention(*leaves, score_mod=lambda s, b, h, q, kv: s + table[b, h, q, kv], backend="cpu")
    grad = torch.randn(out.shape)
    actual = torch.autograd.grad(out, [*leaves, layer.weight, layer.bias], grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    double = made(torch.float64)
    scores = wide[0] @ wide[1].transpose(-1, -2) / 4 + double
    expected = torch.autograd.grad(
        scores.softmax(-1) @ wide[2], [*wide, layer.weight, layer.bias], grad.double()
    )
    for one, two in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parameters_of_any_type(storage: torch.dtype) -> None:
    leaves = _leaves(4, 2, 90, 90, 16, 16)
    table = torch.randn(4, 179).to(storage).requires_grad_()
    slopes = torch.randn(1, 4, 1).to(storage).requires_grad_()

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + table[h, q_idx - kv_idx + 89] + slopes[0, h, 0] * (kv_idx - q_idx) / 90

    _check(leaves, [table, slopes], score_mod=score)


def test_a_score_that_does_not_matter() -> None:
    leaves = _leaves(2, 2, 60, 60, 16, 16)

    def constant(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx >= kv_idx, 0.0, -math.inf)

    out = flexc.attention(*leaves, score_mod=constant, backend="cpu")
    of_q, of_k, of_v = torch.autograd.grad(out, leaves, torch.randn(out.shape))
    assert (of_q == 0).all()
    assert (of_k == 0).all()
    assert (of_v != 0).any()


def test_a_band_of_a_bias_and_a_product_of_vectors() -> None:
    leaves = _leaves(4, 2, 96, 96, 16, 16)
    bias = torch.randn(1, 4, 96, 16, requires_grad=True)

    def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 16)

    _check(leaves, [bias], mask_mod=band, score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, q - kv])
    a = torch.randn(1, 4, 96, 5, requires_grad=True)
    c = torch.randn(1, 2, 96, 5, requires_grad=True)
    dot = lambda s, b, h, q, kv: s + torch.dot(a[b, h, q], c[b, h // 2, kv])  # noqa: E731
    _check(leaves, [a, c], mask_mod=causal, score_mod=dot)


def test_backward_twice() -> None:
    leaves = _leaves(2, 1, 130, 130, 16, 24)
    slope = torch.tensor([0.1, 0.2], requires_grad=True)
    out = flexc.attention(
        *leaves, mask_mod=causal, score_mod=lambda s, b, h, q, kv: s + slope[h] * (kv - q), backend="cpu"
    )
    grad = torch.randn(out.shape)
    first = torch.autograd.grad(out, [*leaves, slope], grad, retain_graph=True)
    second = torch.autograd.grad(out, [*leaves, slope], grad)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, grad)


def test_values_of_another_head_dimension_at_10000() -> None:
    leaves = _leaves(8, 4, 10_000, 10_000, 64, 128)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)

    out = flexc.attention(*leaves, mask_mod=window, backend="cpu")
    grad = torch.zeros(out.shape)
    grad[:, :, 9_900:] = torch.randn(1, 8, 100, 128)
    actual = torch.autograd.grad(out, leaves, grad)
    assert [x.shape for x in actual] == [x.shape for x in leaves]
    q, k, v = leaves[0][:, :, 9_900:], leaves[1][:, :, 9_861:], leaves[2][:, :, 9_861:]
    expected = golden_gradients(
        q, k, v, grad[:, :, 9_900:], mask_mod=lambda b, h, q, kv: window(b, h, q + 9_900, kv + 9_861)
    )
    expected.check([actual[0][:, :, 9_900:], *(x[:, :, 9_861:] for x in actual[1:])])
    assert all((x[:, :, :9_861] == 0).all() for x in actual)


def test_autocast() -> None:
    leaves = _leaves(2, 2, 90, 90, 16, 16)
    grad = torch.randn(1, 2, 90, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flexc.attention(leaves[0], leaves[1].bfloat16(), leaves[2], mask_mod=causal, backend="cpu")
    assert out.dtype is torch.bfloat16
    actual = torch.autograd.grad(out, leaves, grad)
    assert all(x.dtype is torch.float32 for x in actual)
    q, k, v = (x.detach().bfloat16() for x in leaves)
    golden_gradients(q, k, v, grad, mask_mod=causal).check([x.bfloat16() for x in actual])


@pytest.mark.parametrize("block_size", [16, 100, 256, (32, 128)])
def test_block_masks_of_any_size(block_size: int | tuple[int, int]) -> None:
    leaves = _leaves(4, 2, 100, 230, 16, 16)

    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + 130 >= kv_idx) & ((kv_idx // 32) % 3 != h % 3)

    blocks = flexc.create_block_mask(by_head, 1, 4, 100, 230, device="cpu", BLOCK_SIZE=block_size)
    _check(leaves, block_mask=blocks)
