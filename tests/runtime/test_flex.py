"""`flex_attention` as a drop-in for PyTorch's: the same results, and errors of the same classes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flexc
from flexc import AuxOutput, AuxRequest, create_block_mask, flex_attention
from flexc.errors import BlockMaskMismatch, ShapeMismatch, UnknownOption, UnsupportedFeature


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - (h + 1) * 0.125 * (q_idx - kv_idx)


def _qkv(heads: int = 4, kv_heads: int = 4, q_len: int = 100, kv_len: int = 100, batch: int = 2) -> Any:
    return (
        torch.randn(batch, heads, q_len, 16),
        torch.randn(batch, kv_heads, kv_len, 16),
        torch.randn(batch, kv_heads, kv_len, 16),
    )


def _torch(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch_flex.flex_attention(*args, **options)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_equal_pytorch(kv_heads: int) -> None:
    q, k, v = _qkv(kv_heads=kv_heads)
    ours = create_block_mask(causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=64)
    theirs = torch_flex.create_block_mask(causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=64)
    options: dict[str, Any] = {"score_mod": alibi, "scale": 0.2, "enable_gqa": kv_heads != 4}
    out, aux = flex_attention(q, k, v, block_mask=ours, return_aux=AuxRequest(lse=True), **options)
    expected, lse = _torch(q, k, v, block_mask=theirs, return_lse=True, **options)
    torch.testing.assert_close(out, expected)
    assert isinstance(aux, AuxOutput)
    assert aux.lse is not None
    assert aux.max_scores is None
    torch.testing.assert_close(aux.lse, lse)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=theirs, **options), expected)


def test_forms_of_the_result() -> None:
    q, k, v = _qkv()
    assert isinstance(flex_attention(q, k, v), torch.Tensor)
    _, lse = flex_attention(q, k, v, return_lse=True)
    assert isinstance(lse, torch.Tensor)
    assert lse.shape == (2, 4, 100)
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest())
    assert aux == AuxOutput(None, None)


def test_the_empty_block_mask_of_pytorch_masks_nothing() -> None:
    q, k, v = _qkv()
    empty = torch_flex._create_empty_block_mask(q, k)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=empty), flex_attention(q, k, v))


def test_one_batch_of_keys_serves_all_queries_under_a_block_mask() -> None:
    q, k, v = _qkv()
    mask = create_block_mask(causal, 2, None, 100, 100, device="cpu")
    out = flex_attention(q, k[:1], v[:1], block_mask=mask)
    expected = flexc.attention(q, k[:1].expand_as(k), v[:1].expand_as(v), mask_mod=causal)
    torch.testing.assert_close(out, expected)
    with pytest.raises(ShapeMismatch, match="query has batch 2 and key has 1"):
        flex_attention(q, k[:1], v[:1])
    with pytest.raises(BlockMaskMismatch, match="block mask 1"):
        flex_attention(
            q, k[:1], v[:1], block_mask=create_block_mask(causal, None, None, 100, 100, device="cpu")
        )


@pytest.mark.parametrize(
    ("made_for", "actual"),
    [((100, 256), (100, 128)), ((100, 128), (100, 256)), ((64, 100), (100, 100))],
)
def test_a_block_mask_of_other_lengths_is_an_error_that_names_both(
    made_for: tuple[int, int], actual: tuple[int, int]
) -> None:
    q, k, v = _qkv(q_len=actual[0], kv_len=actual[1])
    mask = create_block_mask(causal, None, None, *made_for, device="cpu")
    with pytest.raises(BlockMaskMismatch) as caught:
        flex_attention(q, k, v, block_mask=mask)
    assert isinstance(caught.value, ValueError)
    for lengths in (made_for, actual):
        assert f"({lengths[0]}, {lengths[1]})" in str(caught.value)


@pytest.mark.parametrize(("batch", "heads"), [(3, None), (None, 5), (3, 5), (3, 4), (2, 5)])
def test_a_block_mask_of_other_batches_or_heads_is_an_error(batch: int | None, heads: int | None) -> None:
    q, k, v = _qkv()

    def reads_both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (b >= 0) & (h >= 0)

    for mask_mod in (causal, reads_both):
        mask = create_block_mask(mask_mod, batch, heads, 100, 100, device="cpu")
        with pytest.raises(BlockMaskMismatch):
            flex_attention(q, k, v, block_mask=mask)
        with pytest.raises(BlockMaskMismatch):
            flexc.attention(q, k, v, block_mask=mask)


def test_mistakes() -> None:
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="multiple"):
        flex_attention(q, k[:, :3], v[:, :3], enable_gqa=True)
    with pytest.raises(ValueError, match="head_dim"):
        flex_attention(q, k[..., :8], v)
    with pytest.raises(ValueError, match="return_lse and return_aux"):
        flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(UnsupportedFeature, match="max_scores"):
        flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    with pytest.raises(UnknownOption, match="BLOCK_Z"):
        flex_attention(q, k, v, kernel_options={"BLOCK_Z": 3})
    with pytest.raises(UnknownOption, match="'CUDA'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "CUDA"})
    with pytest.raises(UnknownOption, match="FORCE_USE_FLEX_ATTENTION"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True})


def test_known_kernel_options_are_hints() -> None:
    q, k, v = _qkv()
    options = {"fwd_BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1, "BACKEND": "TRITON"}
    torch.testing.assert_close(flex_attention(q, k, v, kernel_options=options), flex_attention(q, k, v))
