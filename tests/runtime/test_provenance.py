"""Block masks whose blocks a closed form says as well: they need no map, until something differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexc
from flexc import masks
from flexc.call import AttentionCall
from flexc.callspec import spec_of
from flexc.ir.spec import Blocks
from flexc.provenance import without_own_map
from flexc.resolve import resolve

LENGTH = 200


def _blocks(
    block_mask: Any,
    *,
    mask: Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    batch: int = 2,
) -> Blocks:
    q = torch.zeros(batch, 2, LENGTH, 16)
    mods, values, block_map = resolve(score, mask, block_mask)
    call = AttentionCall(
        q=q, k=q, v=q, mods=mods, values=values, block_map=block_map, scale=1.0, sinks=None,
        return_lse=False, out=None, allow_tf32=False,
    )  # fmt: skip
    return spec_of(without_own_map(call)).blocks


def _made(mask: Callable[..., Any], batch: int | None = None) -> flexc.BlockMask:
    return flexc.create_block_mask(mask, batch, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=48)


def _bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


SLOPES = torch.ones(2)


def test_the_closed_form_stands_for_the_map() -> None:
    window = masks.sliding_window(30)
    assert _blocks(_made(window)) is Blocks.RANGES
    assert _blocks(_made(window), mask=window) is Blocks.RANGES
    assert _blocks(_made(window), score=_bias) is Blocks.RANGES
    assert _blocks(_made(masks.dilated(3, 4))) is Blocks.MAP


def test_another_mask_beside_it_is_met_with_the_map() -> None:
    assert _blocks(_made(masks.causal), mask=masks.sliding_window(30)) is Blocks.MAP


def test_slices_other_functions_and_lists_stay_maps() -> None:
    made = _made(masks.causal)
    part = made[:, :, :]
    part.mask_mod = masks.sliding_window(30)
    assert _blocks(part) is Blocks.MAP
    made.mask_mod = masks.sliding_window(30)
    assert _blocks(made) is Blocks.MAP
    assert _blocks(flexc.BlockMask.from_torch(_made(masks.causal).to_torch())) is Blocks.MAP


def test_a_write_to_a_captured_tensor_keeps_the_map_as_it_was() -> None:
    ends = torch.full((LENGTH,), 50)
    mask = masks.causal & (lambda b, h, q_idx, kv_idx: kv_idx < ends[q_idx])
    made = _made(mask)
    assert _blocks(made) is Blocks.RANGES
    ends.fill_(60)
    assert _blocks(made) is Blocks.MAP


@pytest.mark.parametrize(("made_for", "expected"), [(None, Blocks.MAP), (2, Blocks.RANGES)])
def test_a_map_of_one_batch_serves_all_as_in_pytorch(made_for: int | None, expected: Blocks) -> None:
    prefix = masks.prefix_lm(torch.tensor([10, 90]))
    assert _blocks(_made(prefix, made_for)) is expected
    assert _blocks(_made(prefix), batch=1) is Blocks.RANGES
