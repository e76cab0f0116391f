"""Calls that repeat: what is launched again, what is decided again, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flexc
from flexc import gpu, masks, replay
from flexc.backward_script import Script
from flexc.prepared_captures import Captures
from tests.interpreter import faked_gpu


@pytest.fixture(autouse=True)
def _faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replay._prepared.clear()
    faked_gpu.install(monkeypatch)
    yield
    replay._prepared.clear()


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
    assert len(replay._prepared) == 2


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


def test_one_tensor_that_is_q_and_k_is_two_the_next_time(written: list[Any]) -> None:
    x = torch.randn(1, 2, 40, 16, requires_grad=True)
    _check(x, x, x, x, mask_mod=masks.causal)
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    _check(q, k, v, q, k, v, mask_mod=masks.causal)
    assert len(written) == 1


def test_other_captured_tensors_of_the_same_layout(decided: list[Any], written: list[Any]) -> None:
    for n in range(3):
        torch.manual_seed(n)
        bias, flags = torch.randn(2, 100, requires_grad=True), torch.rand(56) < 0.7

        def score(
            score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Any = bias, flags: Any = flags
        ) -> Any:
            return torch.where(flags[kv_idx], score, 0.0) + bias[h, q_idx - kv_idx + 56]

        q, k, v = _qkv(requires_grad=True)
        _check(q, k, v, q, k, v, bias, score_mod=score)
        with torch.no_grad():
            _check(q, k, v, score_mod=score)
    assert (len(decided), len(written)) == (2, 1)


@pytest.mark.parametrize("change", ["strides", "shape", "dtype", "number", "gradient"])
def test_captured_values_that_decide_more_than_addresses(decided: list[Any], change: str) -> None:
    q, k, v = _qkv(requires_grad=True)
    bias, number = torch.randn(2, 100), 2
    others = {
        "strides": (torch.randn(100, 2).T, 2),
        "shape": (torch.randn(2, 101), 2),
        "dtype": (bias.bfloat16(), 2),
        "number": (bias, 3),
        "gradient": (bias.clone().requires_grad_(), 2),
    }
    for b, n in ((bias, number), others[change], (bias, number), others[change]):
        _check(q, k, v, q, *([b] if b.requires_grad else []), score_mod=_biased(b, n))
    assert 2 <= len(decided) <= 4


def _biased(bias: torch.Tensor, shift: int) -> Any:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, kv_idx + shift]

    return score


def test_layers_that_alternate(decided: list[Any]) -> None:
    ids = [torch.arange(60) // 20, torch.arange(60) // 25]
    layers = [(masks.document(x), torch.randn(2, 100)) for x in ids]
    for _ in range(3):
        for mask, bias in layers:
            _check(*_qkv(), mask_mod=mask, score_mod=_biased(bias, 1))
            bias.add_(1.0)  # no map was found from it
    assert len(decided) == 2
    ids[1].copy_(ids[0])
    for mask, bias in layers:
        _check(*_qkv(), mask_mod=mask, score_mod=_biased(bias, 1))
    assert len(decided) == 3


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dropout(decided: list[Any], written: list[Any], requires_grad: bool) -> None:
    for n in range(3):
        q, k, v = _qkv(requires_grad=requires_grad)
        results = []
        for backend in ("triton", "cpu"):
            torch.manual_seed(n)
            out = flexc.attention(q, k, v, mask_mod=masks.causal, dropout_p=0.3, backend=backend)
            loss = (out * torch.linspace(-1, 1, 16)).sum()
            grads = torch.autograd.grad(loss, (q, k, v)) if requires_grad else ()
            results.append([out, *grads, torch.randn(())])
        torch.testing.assert_close(results[0], results[1], rtol=2e-4, atol=2e-4)
    assert (len(decided), len(written)) == (1, int(requires_grad))
    flexc.attention(q, k, v, mask_mod=masks.causal, dropout_p=0.4, backend="triton")
    assert len(decided) == 2


def test_dropout_that_is_none(decided: list[Any]) -> None:
    for p in (2.0, -0.5, "much", None, True):
        with pytest.raises(flexc.FlexcError, match="dropout_p"):
            flexc.attention(*_qkv(), dropout_p=p, backend="triton")  # type: ignore[arg-type]
    assert not decided


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, "strided"])
def test_sinks_that_kernels_read_a_copy_of(decided: list[Any], written: list[Any], form: Any) -> None:
    for n in range(3):
        torch.manual_seed(n)
        sinks = torch.randn(4)[::2] if form == "strided" else torch.randn(2, dtype=form)
        q, k, v = _qkv(requires_grad=True)
        results = []
        for backend in ("triton", "cpu"):
            leaf = sinks.detach().requires_grad_()
            out = flexc.attention(q, k, v, sinks=leaf, backend=backend)
            results.append([out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v, leaf))])
        assert results[0][-1].dtype is sinks.dtype
        torch.testing.assert_close(results[0][:-1], results[1][:-1], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(results[0][-1], results[1][-1], rtol=2e-2, atol=2e-3)
        with torch.no_grad():
            ours, theirs = (flexc.attention(q, k, v, sinks=sinks, backend=b) for b in ("triton", "cpu"))
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
    assert (len(decided), len(written)) == (2, 1)


def test_numbers_of_the_host_are_copied_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[float] = []

    def copied(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(float(x))
        return x.clone()

    monkeypatch.setattr("flexc.prepared_captures.as_pointed_to", copied)
    there, number = torch.randn(3), torch.tensor(0.5)
    captures = Captures((there, number), torch.device("meta"), read=(1,), watched=(), records=False)
    monkeypatch.setattr(captures, "_elsewhere", [1])
    assert captures.needs_copies
    first = captures.there([there, number])
    assert first[0] is there
    assert captures.addresses(first) == (first[1].data_ptr(),)
    assert captures.there([there, torch.tensor(0.5)])[1] is first[1]
    number.fill_(0.25)
    assert captures.there([there, number])[1].item() == 0.25
    assert captures.there([there, torch.tensor(0.0)])[1].item() == 0.0
    assert captures.there([there, torch.tensor(-0.0)])[1].signbit()
    assert copies == [0.5, 0.25, 0.0, -0.0]


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
