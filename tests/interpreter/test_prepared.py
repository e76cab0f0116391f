"""Calls that repeat: what is launched again, what is decided again, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flexc
from flexc import gpu, masks, prepared
from flexc.backward_script import Script
from tests.interpreter import faked_gpu


@pytest.fixture(autouse=True)
def _faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    prepared._prepared.clear()
    faked_gpu.install(monkeypatch)
    yield
    prepared._prepared.clear()


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that went the long way."""
    calls: list[Any] = []
    launch = gpu._launch

    def noted(call: Any, backend: str) -> Any:
        calls.append(call)
        return launch(call, backend)

    monkeypatch.setattr(gpu, "_launch", noted)
    return calls


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backwards that were decided, and written down or not."""
    scripts: list[Any] = []

    def noted(given: Any) -> Any:
        scripts.append(Script(given))
        return scripts[-1]

    monkeypatch.setattr("flexc.gpu_backward.Script", noted)
    return scripts


def _qkv(q_len: int = 40, heads: int = 2, **options: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, h, n, 16, **options) for h, n in ((heads, q_len), (1, 56), (1, 56)))


def _check(q: Any, k: Any, v: Any, *wanted: torch.Tensor, backend: str = "triton", **given: Any) -> Any:
    """The call and its gradients equal those of the CPU's backend, which shares none of the code."""
    results = []
    for name in (backend, "cpu"):
        found = flexc.attention(q, k, v, backend=name, **given)
        parts = list(found) if isinstance(found, tuple) else [found]
        torch.manual_seed(3)
        loss = sum((x * torch.randn_like(x)).sum() for x in parts)
        results.append([*parts, *(torch.autograd.grad(loss, wanted) if wanted else ())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_a_repeated_call_is_decided_once(decided: list[Any]) -> None:
    for n in range(3):
        torch.manual_seed(n)
        _check(*_qkv(), mask_mod=masks.causal, return_lse=True)
    assert len(decided) == 1
    _check(*_qkv(41), mask_mod=masks.causal, return_lse=True)
    assert len(decided) == 2


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_repeated_call_with_gradients_is_decided_once(
    decided: list[Any], written: list[Any], return_lse: bool
) -> None:
    ids, sinks = torch.arange(60) // 20, torch.randn(2, requires_grad=True)
    bias, mask = torch.randn(2, 100, requires_grad=True), masks.document(ids)
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[h, q_idx - kv_idx + 56])
    for n in range(3):
        torch.manual_seed(n)
        q, k, v = _qkv(requires_grad=True)
        wanted = (q, k, v, sinks, bias)
        _check(q, k, v, *wanted, return_lse=return_lse, mask_mod=mask, score_mod=score, sinks=sinks)
    assert len(decided) == 1
    assert len(written) == 1


def test_what_needs_gradients_decides(decided: list[Any]) -> None:
    bias = torch.randn(100)
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + 56])
    q, k, v = _qkv()
    _check(q, k, v, score_mod=score)
    for x in (k, bias, q):
        x.requires_grad_()
        _check(q, k, v, x, score_mod=score)
    assert len(decided) == 4
    with torch.no_grad():
        assert not flexc.attention(q, k, v, score_mod=score, backend="triton").requires_grad
    _check(q, k, v, q, k, bias, score_mod=score)
    bias.requires_grad_(False)
    _check(q, k, v, q, k, score_mod=score)


def test_autocast_prepares_what_it_does_not_cast(decided: list[Any]) -> None:
    q, k, v = _qkv(dtype=torch.float16, requires_grad=True)
    torch.set_autocast_enabled("cuda", True)
    try:
        for dtype, count in ((torch.float16, 1), (torch.bfloat16, 3)):
            torch.set_autocast_dtype("cuda", dtype)
            for _ in range(2):
                flexc.attention(q, k, v, backend="triton")
            assert len(decided) == count
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_a_tensor_that_was_written_since_has_no_backward() -> None:
    bias = torch.randn(100, requires_grad=True)
    q, k, v = _qkv()
    for _ in range(2):
        score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + 56])
        out = flexc.attention(q, k, v, score_mod=score, backend="triton")
        with torch.no_grad():
            bias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("kind", ["flexc", "torch", "other"])
def test_block_masks(decided: list[Any], written: list[Any], kind: str) -> None:
    ids = torch.arange(60) // 20
    mask = masks.document(ids)
    block_mask: Any = flexc.create_block_mask(mask, None, None, 40, 56, device="cpu", BLOCK_SIZE=16)
    if kind == "torch":
        block_mask = block_mask.to_torch()
    given: dict[str, Any] = {"mask_mod": masks.causal} if kind == "other" else {}
    for n in range(2):
        torch.manual_seed(n)
        q, k, v = _qkv(requires_grad=True)
        _check(q, k, v, q, k, v, block_mask=block_mask, **given)
    assert len(decided) == len(written) == 1
    ids[:20] = 1  # the map says what it said, the mask something else: what both allow
    _check(q, k, v, q, k, v, block_mask=block_mask, **given)
    assert len(decided) == len(written) == 2


def test_a_block_mask_of_odd_blocks_is_not_kept(decided: list[Any]) -> None:
    block_mask = flexc.create_block_mask(masks.causal, None, None, 40, 56, device="cpu", BLOCK_SIZE=24)
    block_mask.mask_mod = flexc.noop_mask  # which blocks are listed is made a part of the mask
    q, k, v = _qkv(requires_grad=True)
    for _ in range(2):
        _check(q, k, v, q, k, v, block_mask=block_mask)
    assert len(decided) >= 2


def test_what_belongs_to_tensors_and_maps_that_are_gone_is_forgotten() -> None:
    for n in range(3):
        ids = torch.arange(60) // (20 + n)
        block_mask = flexc.create_block_mask(masks.document(ids), None, None, 40, 56, device="cpu")
        flexc.attention(*_qkv(), block_mask=block_mask, backend="triton")
        flexc.attention(*_qkv(), mask_mod=masks.document(ids), backend="triton")
    assert len(prepared._prepared) == 2


def test_gradients_of_strided_inputs_have_their_layout(written: list[Any]) -> None:
    """A layer's (batch, length, heads, dim): what comes back is copied nowhere."""
    for n in range(2):
        torch.manual_seed(n)
        x = [torch.randn(1, length, 2, 16, requires_grad=True) for length in (40, 56, 56)]
        q, k, v = (y.transpose(1, 2) for y in x)
        _check(q, k, v, q, k, v, mask_mod=masks.causal)
        out = flexc.attention(q, k, v, mask_mod=masks.causal, backend="triton")
        (grad,) = torch.autograd.grad(out.sum(), (q,))
        assert grad.stride() == q.stride()
    assert len(written) == 1


def test_hooks_on_saved_tensors(written: list[Any]) -> None:
    """What they put in place of a tensor may lie elsewhere."""
    bias = torch.randn(100, requires_grad=True)
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + 56])
    q, k, v = _qkv(requires_grad=True)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            _check(q, k, v, q, k, v, bias, score_mod=score)
    _check(q, k, v, q, k, v, bias, score_mod=score)


def test_backwards_that_need_less(written: list[Any]) -> None:
    q, k, v = _qkv(requires_grad=True)
    for wanted in ((q, k, v), (q,), (k, v), (q, k, v), (q,)):
        _check(q, k, v, *wanted, mask_mod=masks.causal, return_lse=True)
    out, lse = flexc.attention(q, k, v, mask_mod=masks.causal, return_lse=True, backend="triton")
    for loss in (out.sum(), lse.sum(), (out.sum() + lse.sum())):
        torch.autograd.grad(loss, (q, k), retain_graph=True)
    grads = [torch.autograd.grad((2 * out).sum(), (q, k), retain_graph=True) for _ in range(2)]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = _qkv(requires_grad=True)
    for _ in range(2):
        out = flexc.attention(q, k, v, backend="triton")
        (grad,) = torch.autograd.grad(out.sum(), (q,), create_graph=True)
        with pytest.raises(flexc.errors.NotDifferentiable):
            grad.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_prepared_calls(reentrant: bool) -> None:
    bias = torch.randn(100, requires_grad=True)
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + 56])
    q, k, v = _qkv(requires_grad=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flexc.attention(q, k, v, mask_mod=masks.causal, score_mod=score, backend="triton")

    expected = torch.autograd.grad(attend(q, k, v).pow(2).sum(), (q, k, v, bias))
    for _ in range(2):
        out: Any = checkpoint(attend, q, k, v, use_reentrant=reentrant)
        for x in (q, k, v, bias):
            x.grad = None
        out.pow(2).sum().backward()
        for x, grad in zip((q, k, v, bias), expected, strict=True):
            torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("form", ["q", "bias"])
def test_batched_gradients_of_prepared_calls(form: str) -> None:
    bias = torch.randn(100, requires_grad=True)
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + 56])
    q, k, v = _qkv(requires_grad=True)
    wanted = (q, k) if form == "q" else (v, bias)
    grads = torch.randn(2, *q.shape)
    for _ in range(2):
        out = flexc.attention(q, k, v, score_mod=score, backend="triton")
        found = torch.autograd.grad(out, wanted, grads, is_grads_batched=True, retain_graph=True)
        for n, one in enumerate(grads):
            expected = torch.autograd.grad(out, wanted, one, retain_graph=True)
            torch.testing.assert_close([x[n] for x in found], list(expected))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_dual_tensors_are_no_repetition() -> None:
    bias = torch.randn(100)
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + 56])
    q, k, v = _qkv()
    for _ in range(2):
        flexc.attention(q, k, v, score_mod=score, backend="triton")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.randn_like(q))
        with pytest.raises(flexc.FlexcError, match="forward-mode"):
            flexc.attention(dual, k, v, score_mod=score, backend="triton")
        bias = forward_ad.make_dual(bias, torch.randn_like(bias))
        with pytest.raises(flexc.FlexcError, match="forward-mode"):
            flexc.attention(q, k, v, score_mod=score, backend="triton")
