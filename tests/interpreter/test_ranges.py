"""Kernels that compute their loop bounds, in Triton's interpreter: the golden's numbers, the map's bits."""

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
from flexc.resolve import resolve
from tests.oracle import golden

TILES = {"block_q": 32, "block_kv": 16, "num_warps": 4, "num_stages": 1}
OFFSETS = torch.tensor([0, 3, 30, 31, 31, 60, 75])
WINDOWS, KIND = torch.tensor([5, 50]), torch.tensor([0, 1])


def _first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 20


def _by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOWS[h])


def _by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (KIND[b] == 0) | (q_idx >= kv_idx)


def _falling(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= 70 - q_idx) & (kv_idx < 80 - q_idx)


LARGE = torch.tensor([2**40, 2**40 + 5, 2**33])


def _large(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx + LARGE[0] <= q_idx + LARGE[1]) & (q_idx - LARGE[2] < kv_idx)


def _some_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 3 != 1) & (q_idx >= 40) & (kv_idx >= q_idx - 20)


MASKS: dict[str, Callable[..., Any]] = {
    "causal": masks.causal,
    "window": masks.sliding_window(19),
    "prefix": masks.prefix_lm(29),
    "prefix_by_batch": masks.prefix_lm(torch.tensor([29, 3])),
    "chunked": masks.chunked(23),
    "global_and_window": masks.causal & (masks.sliding_window(19) | _first),
    "documents": masks.causal & masks.document_from_cu_seqlens(OFFSETS),
    "block_diffusion": masks.block_diffusion(38, 7),
    "by_head": _by_head,
    "by_batch": _by_batch,
    "not_causal": ~masks.causal,
    "outside_a_window": ~masks.sliding_window(37),
    "three_ranges": masks.sliding_window(5) | _falling | _first,
    "some_rows": _some_rows,
    "differences_of_large_numbers": _large,
}
LENGTHS = [(75, 75), (40, 75), (75, 40)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", list(MASKS))
def test_right_numbers_and_the_bits_of_a_map(name: str, lengths: tuple[int, int]) -> None:
    mask = MASKS[name]
    q = torch.randn(2, 2, lengths[0], 16)
    k, v = torch.randn(2, 2, 1, lengths[1], 16)
    assert _blocks(mask, q, k) is Blocks.RANGES
    with torch.no_grad():
        computed = _run(mask, q, k, v)
        golden(q, k, v, mask_mod=mask).check(*computed)
        if lengths == LENGTHS[0]:
            for one, other in zip(computed, _run(mask, q, k, v, blocks="map"), strict=True):
                assert torch.equal(one, other)


def _run(
    mask: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return flexc.attention(
        q, k, v, mask_mod=mask, return_lse=True, backend="triton", options={**TILES, **options}
    )


def _blocks(mask: Callable[..., Any], q: torch.Tensor, k: torch.Tensor) -> Blocks:
    mods, values, block_map = resolve(None, mask)
    call = AttentionCall(
        q=q, k=k, v=k, mods=mods, values=values, block_map=block_map, scale=1.0, sinks=None,
        return_lse=True, out=None, allow_tf32=False,
    )  # fmt: skip
    return spec_of(call).blocks


def test_a_call_that_the_closed_form_does_not_hold_for_takes_a_map() -> None:
    mask = masks.block_diffusion(24, 7)
    for length, expected in ((48, Blocks.RANGES), (60, Blocks.MAP)):
        q = torch.randn(1, 1, length, 16)
        assert _blocks(mask, q, q) is expected
        golden(q, q, q, mask_mod=mask).check(*_run(mask, q, q, q))


def test_unseen_values_are_left_out_where_there_are_several_ranges() -> None:
    q, k, v = torch.randn(3, 1, 2, 75, 16)

    def no_last(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 73

    mask = (masks.sliding_window(5) | _falling | _first) & no_last
    clean = _run(mask, q, k, v)[0]
    v[:, :, 73:] = float("nan")
    assert torch.equal(_run(mask, q, k, v)[0], clean)
