"""Rows of several heads in one tile of the Hopper kernel, on the GPU that it is made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores
from flexc.launcher import recording
from tests.gpu.inputs import NEEDS_SM90
from tests.oracle import golden

pytestmark = NEEDS_SM90
Mod = Callable[..., Any]


def _tensors(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (
        (heads[0], lengths[0], dims[0]),
        (heads[1], lengths[1], dims[0]),
        (heads[1], lengths[1], dims[1]),
    )
    q, k, v = (torch.randn(batch, *shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: int, **arguments: Any) -> None:
    expected = golden(q, k, v, **arguments)
    with torch.no_grad(), recording() as made:
        out, lse = flexc.attention(q, k, v, return_lse=True, backend="hopper", **arguments)
    assert made[-1].packed_heads == packed
    expected.check(out, lse)


def _last_rows(off: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + off


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("batch", "heads", "lengths", "packed"),
    [
        (2, (8, 2), (16, 700), 4),
        (1, (8, 1), (1, 3000), 8),
        (3, (6, 2), (20, 333), 4),
        (2, (10, 2), (7, 1000), 8),
        (1, (32, 8), (64, 1024), 4),
        (1, (64, 1), (5, 777), 64),
        (2, (4, 2), (33, 33), 2),
        (1, (16, 2), (1, 1), 8),
        (5, (32, 8), (66, 2100), 4),
        (64, (16, 4), (2, 200), 4),
        (1, (70, 1), (3, 200), 1),
    ],
)
def test_shapes(batch: int, heads: tuple[int, int], lengths: tuple[int, int], packed: int, dim: int) -> None:
    q, k, v = _tensors(batch, heads, lengths, (dim, dim), torch.bfloat16)
    for mask in (None, _last_rows(lengths[1] - lengths[0])):
        _check(q, k, v, packed, mask_mod=mask)


@pytest.mark.parametrize(("dim", "dim_v"), [(40, 40), (72, 80), (96, 96), (192, 128), (256, 256), (64, 128)])
def test_head_dims(dim: int, dim_v: int) -> None:
    _check(*_tensors(2, (6, 2), (20, 333), (dim, dim_v), torch.float16), 4, mask_mod=_last_rows(313))


MODS = (
    "even", "causal", "window", "alibi", "soft_cap", "by_distance", "by_row", "by_key", "documents", "prefix",
    "sinks", "scale",
)  # fmt: skip


def _mods(heads: int, kv_len: int) -> dict[str, dict[str, Any]]:
    slopes = torch.linspace(0.01, 0.5, heads, device="cuda")
    table = torch.randn(heads, 1000, device="cuda")
    ids = torch.arange(kv_len, device="cuda", dtype=torch.int32) // 70
    last = _last_rows(kv_len - 20)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx % 2 == 0

    def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx - kv_idx + 500]

    def by_row(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * slopes[h] + table[h, q_idx] * kv_idx * 0.001 + h * 0.1

    def by_key(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + ids[kv_idx] * 0.1

    return {
        "even": {"mask_mod": even},
        "causal": {"mask_mod": masks.causal},
        "window": {"mask_mod": last & masks.sliding_window(200)},
        "alibi": {"mask_mod": last, "score_mod": scores.alibi(slopes)},
        "soft_cap": {"mask_mod": last, "score_mod": scores.softcap(20.0)},
        "by_distance": {"score_mod": by_distance},
        "by_row": {"score_mod": by_row, "mask_mod": last},
        "by_key": {"score_mod": by_key},
        "documents": {"mask_mod": masks.document(ids)},
        "prefix": {"mask_mod": masks.prefix_lm(torch.tensor([5, 100], device="cuda", dtype=torch.int32))},
        "sinks": {"mask_mod": last, "sinks": torch.randn(heads, device="cuda")},
        "scale": {"mask_mod": last, "scale": -0.3},
    }


@pytest.mark.parametrize("heads", [6, 16])
@pytest.mark.parametrize("name", MODS)
def test_mods(name: str, heads: int) -> None:
    q, k, v = _tensors(2, (heads, 2), (20, 333), (64, 64), torch.bfloat16)
    _check(q, k, v, 4 if heads == 6 else 8, **_mods(heads, 333)[name])


@pytest.mark.parametrize("heads", [6, 16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_and_values_that_no_row_sees_have_no_effect(poison: float, heads: int) -> None:
    q, k, v = _tensors(2, (heads, 2), (20, 333), (128, 128), torch.bfloat16)
    slopes = scores.alibi(torch.linspace(0.01, 0.5, heads, device="cuda"))

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (kv_idx <= q_idx + 313)

    expected = golden(q, k, v, mask_mod=even, score_mod=slopes)
    k[:, :, 1::2] = poison
    v[:, :, 1::2] = poison
    out, lse = flexc.attention(q, k, v, mask_mod=even, score_mod=slopes, backend="hopper", return_lse=True)
    expected.check(out, lse)


def test_strides_and_repeated_calls() -> None:
    whole = torch.randn(2, 50, 8 + 2 + 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q, k, v = whole[:, :8], whole[:, 8:10], whole[:, 10:]
    _check(q, k, v, 4, mask_mod=masks.causal)
    _check(q, k, v, 4, mask_mod=masks.causal)
    _check(q[:, :, ::2], k, v, 4, mask_mod=masks.causal)
    blocks = flexc.create_block_mask(masks.causal, None, None, 50, 50, device="cuda")
    _check(q, k, v, 4, block_mask=blocks)


def test_a_kernel_made_for_few_rows() -> None:
    kernel = flexc.compile(mask_mod=masks.causal, head_dim=64, return_lse=True, q_len=20, group=4)
    q, k, v = _tensors(2, (6, 2), (20, 333), (64, 64), torch.bfloat16)
    out, lse = kernel(q, k, v)
    golden(q, k, v, mask_mod=masks.causal).check(out, lse)
