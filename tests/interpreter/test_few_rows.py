"""Few query rows: those of all heads of a group in one tile, with all that it may have to know of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores
from tests.oracle import golden


def _check(
    q_len: int,
    heads: int,
    kv_heads: int,
    *,
    dropout_p: float = 0.0,
    with_sinks: bool = False,
    **arguments: Any,
) -> None:
    torch.manual_seed(q_len + heads)
    q = torch.randn(2, heads, q_len, 24).half()
    k, v = torch.randn(2, kv_heads, 70, 24).half(), torch.randn(2, kv_heads, 70, 40).half()
    if with_sinks:
        arguments["sinks"] = torch.randn(heads)
    torch.manual_seed(1)
    seed = int(torch.randint(2**63 - 1, ()))
    expected = golden(q, k, v, dropout_p=dropout_p, dropout_seed=seed, **arguments)
    torch.manual_seed(1)
    out, lse = flexc.attention(q, k, v, return_lse=True, dropout_p=dropout_p, backend="triton", **arguments)
    expected.check(out, lse)


@pytest.mark.parametrize("group", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("q_len", [1, 2, 5, 33])
def test_groups_and_lengths(group: int, q_len: int) -> None:
    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx + 40

    _check(q_len, 2 * group, 2)
    _check(q_len, 2 * group, 2, mask_mod=late)


SLOPES, BIAS, BOOST = torch.rand(12), torch.randn(12, 70), torch.rand(12)
DOCUMENTS = torch.arange(70) // 9


@pytest.mark.parametrize(
    "arguments",
    [
        {"score_mod": scores.alibi(SLOPES)},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score * BOOST[h]},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + BIAS[h, kv_idx]},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: torch.where(h % 2 == 0, score, BIAS[h, q_idx])},
        {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < 20 * (h + 1)},
        {"mask_mod": lambda b, h, q_idx, kv_idx: (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) | (kv_idx % 7 == b)},
        {"mask_mod": masks.prefix_lm(torch.tensor([3, 50])), "with_sinks": True},
        {"mask_mod": masks.sliding_window(3), "score_mod": scores.softcap(2.0), "dropout_p": 0.3},
        {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < 0, "with_sinks": True},
        {"scale": -0.5, "mask_mod": masks.causal},
    ],
    ids=range(10),
)
def test_what_a_tile_knows_of_heads(arguments: dict[str, Any]) -> None:
    _check(3, 12, 2, **arguments)


def test_block_masks() -> None:
    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 20 * h + 3

    for heads in (None, 6):
        blocks = flexc.create_block_mask(
            masks.sliding_window(5), 2, heads, 7, 70, device="cpu", BLOCK_SIZE=16
        )
        _check(7, 6, 2, block_mask=blocks)


def test_keys_that_no_row_sees_have_no_effect() -> None:
    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx % 2 == 0

    q, k, v = (torch.randn(1, heads, n, 16).half() for heads, n in ((6, 2), (2, 70), (2, 70)))
    expected = golden(q, k, v, mask_mod=even)
    k[:, :, 1::2] = torch.nan
    v[:, :, 1::2] = torch.nan
    out, lse = flexc.attention(q, k, v, mask_mod=even, backend="triton", return_lse=True)
    expected.check(out, lse)
