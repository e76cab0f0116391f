"""Every mistake in a call of `attention` has an error of its own, with a hint, before anything runs."""

from __future__ import annotations

import linecache
import re
from typing import Any

import pytest
import torch

import flexc
from flexc import cpu, gpu, masks, reference
from flexc.check import check_blocks, check_captures
from flexc.errors import (
    BackendUnavailable,
    BlockMaskMismatch,
    DeviceMismatch,
    FlexcError,
    NotDifferentiable,
    ShapeMismatch,
    UnknownOption,
    UnsupportedDtype,
    UnsupportedFeature,
    UnsupportedHeadDim,
)


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend computes anything; `gpu.run` is left, which refuses CPU tensors itself."""

    def run(*arguments: Any) -> None:
        raise AssertionError("a backend ran")

    monkeypatch.setattr(cpu, "run", run)
    monkeypatch.setattr(reference, "run", run)


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def refused(
    kind: type[FlexcError], message: str, hint: str, q: Any, k: Any, v: Any, **arguments: Any
) -> FlexcError:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        flexc.attention(q, k, v, **arguments)
    assert hint in (caught.value.hint or ""), caught.value.hint
    return caught.value


Q, K = t(2, 4, 10, 16), t(2, 2, 12, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "message", "hint"),
    [
        (t(4, 10, 16), K, K, "q has 3 dimensions, shape (4, 10, 16)", "unsqueeze(0)"),
        (Q, K, t(12, 16), "v has 2 dimensions", "(batch, heads, length, head_dim)"),
        (Q, t(2, 2, 12, 8), K, "q has head_dim 16 and k has 8", "same last dimension"),
        (Q, K, t(2, 2, 13, 16), "k is (2, 2, 12, 16) and v is (2, 2, 13, 16)", "batch, heads and length"),
        (Q, K[:1], K[:1], "q has batch 2 and k has 1", "k.expand(2, -1, -1, -1)"),
        (Q, t(2, 3, 12, 16), t(2, 3, 12, 16), "q has 4 heads and k has 3", "multiple of the kv heads"),
        (Q, t(2, 0, 12, 16), t(2, 0, 12, 16), "q has 4 heads and k has 0", "multiple"),
        (t(2, 0, 10, 16), K, K, "q has 0 heads and k has 2", "1 or more"),
    ],
)
def test_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, message: str, hint: str) -> None:
    assert isinstance(refused(ShapeMismatch, message, hint, q, k, v), ValueError)


def test_nested_tensors() -> None:
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([t(4, 3, 16), t(4, 5, 16)])
    refused(ShapeMismatch, "q is a nested tensor", "flexc.masks.document", nested, K, K)


def test_things_that_are_no_tensors() -> None:
    refused(UnsupportedDtype, "k must be a torch.Tensor, not list", "", Q, [[1.0]], K)


def test_q_that_is_no_tensor() -> None:
    refused(UnsupportedDtype, "q must be a torch.Tensor, not float", "", 1.0, K, K)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype) -> None:
    x = K.to(dtype)
    error = refused(
        UnsupportedDtype, f"k has dtype {dtype}", "bfloat16, float16, float32 or float64", Q, x, K
    )
    assert isinstance(error, TypeError)


def test_mixed_dtypes() -> None:
    message = "q is torch.float16 and k is torch.float32: k and v may only be of a lower precision than q"
    refused(UnsupportedDtype, message, "k.to(torch.float16)", Q.half(), K, K)
    refused(
        UnsupportedDtype, "v is torch.float16", "v.to(torch.bfloat16)", Q.bfloat16(), K.bfloat16(), K.half()
    )


def test_devices() -> None:
    message = "q, k and v are on cpu, meta and cpu"
    assert isinstance(refused(DeviceMismatch, message, "one device", Q, K.to("meta"), K), ValueError)


def test_devices_without_a_backend() -> None:
    x = t(1, 1, 4, 16, device="meta")
    refused(UnsupportedFeature, "there is no backend for meta tensors", "a GPU or the CPU", x, x, x)


@pytest.mark.parametrize("dim", [0, 513])
def test_head_dimensions(dim: int) -> None:
    x = t(1, 1, 4, dim)
    hint = "head dimensions are 1 to 512"
    refused(UnsupportedHeadDim, f"q and k have head_dim {dim}", hint, x, x, x)
    refused(UnsupportedHeadDim, f"v has head_dim {dim}", hint, t(1, 1, 4, 8), t(1, 1, 4, 8), x)


def test_sinks() -> None:
    refused(ShapeMismatch, "sinks has shape (2,); q has 4 heads", "pass shape (4,)", Q, K, K, sinks=t(2))
    sinks = t(4, dtype=torch.int32)
    refused(UnsupportedDtype, "sinks has dtype torch.int32", "floating-point logits", Q, K, K, sinks=sinks)
    sinks = t(4, device="meta")
    refused(DeviceMismatch, "sinks is on meta, q on cpu", "sinks.to('cpu')", Q, K, K, sinks=sinks)


def test_out() -> None:
    shape = "the result has shape (2, 4, 10, 16)"
    refused(ShapeMismatch, "out has shape (2, 4, 10, 8)", shape, Q, K, K, out=t(2, 4, 10, 8))
    half = t(2, 4, 10, 16, dtype=torch.float16)
    refused(UnsupportedDtype, "out has dtype torch.float16", "the dtype of q", Q, K, K, out=half)
    meta = t(2, 4, 10, 16, device="meta")
    refused(DeviceMismatch, "out is on meta, q on cpu", "allocate it on cpu", Q, K, K, out=meta)
    strided = t(2, 4, 16, 10).transpose(2, 3)
    refused(ShapeMismatch, "out is not contiguous in its last dimension", "torch.empty", Q, K, K, out=strided)


def test_captured_tensors_on_another_device() -> None:
    bias = t(4, device="meta")

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h]

    message = "the captured tensor 'bias' is on meta, q is on cpu"
    refused(DeviceMismatch, message, "bias.to('cpu')", Q, K, K, score_mod=biased)


def test_a_captured_number_in_a_cpu_tensor_goes_anywhere() -> None:
    device = torch.device("meta")
    check_captures(("a", "b", "c"), (torch.tensor(2.0), 3, t(2, device="meta")), device)
    with pytest.raises(DeviceMismatch, match="'a' is on cpu, q is on meta"):
        check_captures(("a",), (t(1),), device)


def test_gradients_that_do_not_exist() -> None:
    width = torch.ones(4, requires_grad=True)

    def by_the_mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < width[h]

    def as_an_index(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx).float() * width[h].int()

    def compared(score, b, h, q_idx, kv_idx):
        return torch.where(score > width[h], score, 2 * score)

    name = "the captured tensor 'width' requires a gradient, but "
    hint = "width.detach()"
    refused(NotDifferentiable, name + "only the mask reads it", hint, Q, K, K, mask_mod=by_the_mask)
    refused(NotDifferentiable, name + "it is only read as an integer", hint, Q, K, K, score_mod=as_an_index)
    refused(NotDifferentiable, name + "it is only compared", hint, Q, K, K, score_mod=compared)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, pytest.raises(AssertionError, match="a backend ran"):
            flexc.attention(Q, K, K, score_mod=compared, mask_mod=by_the_mask)

    def smooth(score, b, h, q_idx, kv_idx):
        return score * width[h]

    with pytest.raises(AssertionError, match="a backend ran"):
        flexc.attention(Q, K, K, score_mod=smooth, mask_mod=by_the_mask)


def test_gradients_that_do_not_exist_are_located() -> None:
    width = torch.ones(4, requires_grad=True)
    mask = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width[h]  # noqa: E731
    score = lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * width[h].int()  # noqa: E731
    for mods in ({"mask_mod": mask}, {"score_mod": score}):
        with pytest.raises(NotDifferentiable) as caught:
            flexc.attention(Q, K, K, **mods)
        span = caught.value.span
        assert span is not None
        assert linecache.getline(span.file, span.line)[span.column : span.end_column] == "width[h]"


def test_gradients_through_the_users_own_output() -> None:
    q, out = Q.clone().requires_grad_(), torch.empty_like(Q)
    refused(NotDifferentiable, "the result is written to out=", "leave out= away", q, K, K, out=out)


def test_gradients_of_a_scale_that_is_a_tensor() -> None:
    scale: Any = torch.tensor(0.5, requires_grad=True)
    refused(
        NotDifferentiable, "scale is a tensor that requires a gradient", "temperature", Q, K, K, scale=scale
    )
    with pytest.raises(AssertionError, match="a backend ran"):
        flexc.attention(Q, K, K, scale=scale.detach())
    with torch.no_grad(), pytest.raises(AssertionError, match="a backend ran"):
        flexc.attention(Q, K, K, scale=scale)


def test_block_masks_of_other_lengths_batches_or_heads() -> None:
    def made(batch: int | None, heads: int | None, q_len: int = 10, kv_len: int = 12) -> Any:
        return flexc.create_block_mask(masks.causal, batch, heads, q_len, kv_len, device="cpu")

    message = "the block mask was made for lengths (10, 16), the tensors have (10, 12)"
    refused(BlockMaskMismatch, message, "make it anew", Q, K, K, block_mask=made(None, None, 10, 16))
    message = "the block mask has batch 3, the tensors have 2"
    refused(BlockMaskMismatch, message, "make it with 2", Q, K, K, block_mask=made(3, None))
    message = "the block mask has heads 2, the tensors have 4"
    refused(BlockMaskMismatch, message, "or with None", Q, K, K, block_mask=made(None, 2))


def test_blocks_for_a_compiled_kernel_are_multiples_of_its_tiles() -> None:
    check_blocks((128, 128), (128, 64))
    check_blocks((96, 64), (32, 64))
    for blocks in ((64, 64), (128, 96), (96, 128)):
        with pytest.raises(BlockMaskMismatch) as e:
            check_blocks(blocks, (128, 64))
        assert f"blocks of {blocks}, the kernel was compiled for tiles of (128, 64)" in str(e.value)
        assert "BLOCK_SIZE=(128, 64), or multiples" in str(e.value)


def test_what_this_version_does_not_have() -> None:
    for name in ("q_scale", "k_scale", "v_scale"):
        refused(UnsupportedFeature, "belong to fp8 inputs", "bf16, fp16 or fp32", Q, K, K, **{name: t(1)})
    refused(UnsupportedFeature, 'backend="blackwell"', "", Q, K, K, backend="blackwell")


def test_dropout_is_a_probability() -> None:
    for wrong in (-0.1, 1.5, float("nan"), True, "0.1"):
        refused(UnknownOption, f"dropout_p is {wrong!r}", "from 0 to 1", Q, K, K, dropout_p=wrong)


def test_backends() -> None:
    refused(
        UnknownOption,
        "there is no backend 'cuda'",
        "auto, triton, hopper, cpu, reference",
        Q,
        K,
        K,
        backend="cuda",
    )
    message = 'backend="triton" needs CUDA tensors; q is on cpu'
    error = refused(BackendUnavailable, message, 'backend="cpu"', Q, K, K, backend="triton")
    message = 'backend="hopper" needs CUDA tensors; q is on cpu'
    refused(BackendUnavailable, message, 'backend="cpu"', Q, K, K, backend="hopper")
    assert isinstance(error, RuntimeError)


def test_no_tensor_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run", cpu.run)
    with pytest.raises(AssertionError, match="a backend ran"):
        flexc.attention(Q, K, K)
    with pytest.raises(AssertionError, match="a backend ran"):
        flexc.attention(Q, K, K, backend="reference")
