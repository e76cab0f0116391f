"""Captured tensors with fewer entries than positions: an error where a visible pair reads a missing one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc.errors import ShapeMismatch

SHORT = torch.zeros(9)


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        (lambda b, h, q_idx, kv_idx: SHORT[q_idx] == SHORT[0], None),
        (lambda b, h, q_idx, kv_idx: (SHORT[kv_idx] == 0) & (q_idx >= kv_idx), None),
        (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, lambda s, b, h, q_idx, kv_idx: s + SHORT[q_idx]),
        (None, lambda s, b, h, q_idx, kv_idx: torch.where(SHORT[kv_idx] > 0, s, 2 * s)),
    ],
    ids=["mask_by_query", "mask_by_key", "score", "condition"],
)
def test_captures_too_short_for_visible_positions(mask: Any, score: Any) -> None:
    q = torch.randn(1, 1, 10, 4)
    with pytest.raises(ShapeMismatch, match=r"'SHORT' has shape \(9,\).*there are 10"):
        flexc.attention(q, q, q, mask_mod=mask, score_mod=score)
    with pytest.raises(Exception, match=r"there are 10"):
        torch.compile(flexc.attention, backend="eager")(q, q, q, mask_mod=mask, score_mod=score)


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        (lambda b, h, q_idx, kv_idx: (kv_idx < 9) & (SHORT[kv_idx] == 0), None),
        (lambda b, h, q_idx, kv_idx: q_idx > kv_idx, lambda s, b, h, q_idx, kv_idx: s + SHORT[kv_idx]),
        (None, lambda s, b, h, q_idx, kv_idx: torch.where(q_idx < 9, SHORT[q_idx], s)),
        (lambda b, h, q_idx, kv_idx: (q_idx > 8) | (SHORT[q_idx] == 0), None),
    ],
    ids=["padding", "strictly_before", "where", "or"],
)
def test_captures_may_be_short_where_something_hides_it(mask: Any, score: Any) -> None:
    q = torch.randn(1, 1, 10, 4)
    assert flexc.attention(q, q, q, mask_mod=mask, score_mod=score).isfinite().all()


def test_a_block_mask_may_hide_what_a_capture_lacks() -> None:
    q = torch.randn(1, 1, 64, 4)
    lists = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    short = torch.zeros(32)
    blocks = flexc.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32)
    flexc.attention(q, q, q, block_mask=blocks, score_mod=lambda s, b, h, q_idx, kv_idx: s + short[kv_idx])
