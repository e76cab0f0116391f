"""Which map a call gets on its device, with the kernels run by Triton's interpreter on the CPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from flexc import device_map_cache, masks
from flexc.call import AttentionCall
from flexc.device_map import DeviceMap
from flexc.device_map_cache import (
    device_map_for,
    effective_device_map,
    is_map_of_mask,
    transposed_on,
)
from flexc.errors import MaskTooOpen
from flexc.ir.blockmap import BlockMap, from_kinds
from flexc.ir.runs import TileGrid
from flexc.map_cache import blocks_of
from flexc.resolve import resolve

CPU = torch.device("cpu")


def call_of(mask: Any, block_map: BlockMap | DeviceMap | None = None, score: Any = None) -> AttentionCall:
    mods, values, _ = resolve(score, mask)
    x = torch.zeros(2, 2, 60, 16)
    return AttentionCall(
        q=x,
        k=x,
        v=x,
        mods=mods,
        values=values,
        block_map=block_map,
        scale=1.0,
        sinks=None,
        return_lse=False,
        out=None,
        allow_tf32=False,
    )


def map_of(mask: Any) -> DeviceMap:
    mods, values, _ = resolve(None, mask)
    assert mods.mask is not None
    found = device_map_for(mods.mask, mods.captures, values, TileGrid(60, 60, 16, 16, 2, 2), CPU)
    assert found is not None
    return found


def test_a_map_is_found_again_when_a_tensor_was_written_and_only_then() -> None:
    ids = torch.arange(60) // 20
    mask = masks.document(ids)
    first = effective_device_map(call_of(mask), 16, 16)
    assert effective_device_map(call_of(mask), 16, 16) is first
    slopes = torch.ones(2)
    beside = call_of(mask, score=lambda score, b, h, q_idx, kv_idx: score * slopes[h])
    assert effective_device_map(beside, 16, 16) is first
    ids.zero_()
    second = effective_device_map(call_of(mask), 16, 16)
    assert second is not first
    assert second.host().counts() == (0, 4, 12)
    assert effective_device_map(call_of(masks.document(ids.clone())), 16, 16) is not second


def test_a_map_of_the_mask_itself_is_taken_as_it_is() -> None:
    ids = torch.arange(60) // 20
    mask = masks.document(ids)
    given = map_of(mask)
    assert effective_device_map(call_of(mask, given), 16, 16) is given
    ids.zero_()
    assert not is_map_of_mask(call_of(mask, given))
    met = effective_device_map(call_of(mask, given), 16, 16)
    np.testing.assert_array_equal(
        met.host().kinds(), np.minimum(given.host().kinds(), map_of(mask).host().kinds())
    )


def test_a_listed_map_is_met_with_the_mask() -> None:
    kinds = np.zeros((2, 1, 4, 4), np.uint8)
    kinds[0, 0, :, :3] = 2
    given = from_kinds(kinds, q_len=60, kv_len=60, block_q=16, block_kv=16)
    met = effective_device_map(call_of(masks.causal, given), 32, 32)
    assert met.host().kinds(0).tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 0]]
    assert met.host().kinds(1).sum() == 0
    assert effective_device_map(call_of(masks.causal, given), 32, 32) is met
    assert effective_device_map(call_of(None, given), 32, 32).host().kinds().tolist() == kinds[0, 0].tolist()


def test_maps_of_tensors_that_came_and_went_are_not_held() -> None:
    def one_step() -> weakref.ref[DeviceMap]:
        mask = masks.document(torch.arange(60) // 20)
        return weakref.ref(transposed_on(effective_device_map(call_of(mask), 16, 16)))

    steps = [one_step() for _ in range(3)]
    gc.collect()
    map_of(masks.sliding_window(7))
    gc.collect()
    assert [step() for step in steps] == [None] * 3


def test_a_transpose_is_found_once() -> None:
    given = map_of(masks.causal)
    assert transposed_on(given) is transposed_on(given)
    assert transposed_on(given).host().kinds().tolist() == given.host().kinds().T.tolist()


def test_numbers_and_tensors_of_no_dimension() -> None:
    width = torch.tensor(20)
    mask = masks.causal & (lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width)
    assert effective_device_map(call_of(mask), 16, 16).host().counts() == (7, 9, 0)
    width.fill_(1)
    assert effective_device_map(call_of(mask), 16, 16).host().counts() == (12, 4, 0)


def scattered(order: torch.Tensor) -> Any:
    return lambda b, h, q_idx, kv_idx: (order[q_idx] * 31 + order[kv_idx] * 17) % 101 < 3


def test_an_open_mask_is_divided_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = scattered(torch.randperm(60))
    looked_at = map_of(mask).host()
    monkeypatch.setattr(device_map_cache, "WORTH_WAITING", 100)
    mods, values, _ = resolve(None, scattered(mask.__closure__[0].cell_contents.clone()))
    assert mods.mask is not None
    grid = TileGrid(60, 60, 16, 16, 1, 1)
    divided = device_map_for(mods.mask, mods.captures, values, grid, CPU)
    assert divided is not None
    np.testing.assert_array_equal(divided.host().runs, looked_at.runs)


def test_inside_a_graph_an_open_mask_needs_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_map_cache, "_graph_being_captured", lambda device: (1, 1))
    mods, values, _ = resolve(None, scattered(torch.randperm(60)))
    assert mods.mask is not None
    grid = TileGrid(60, 60, 16, 16, 1, 1)
    with pytest.raises(MaskTooOpen, match=r"3.6e\+03 evaluations.*CUDA graph") as e:
        device_map_for(mods.mask, mods.captures, values, grid, CPU, budget=1000)
    assert "budget=4096" in str(e.value.hint)
    built = device_map_for(mods.mask, mods.captures, values, grid, CPU, budget=4096)
    assert built is not None
    assert built.origin is None


def test_a_mask_on_the_cpu_has_its_map_on_the_host() -> None:
    mods, values, _ = resolve(None, masks.causal)
    assert mods.mask is not None
    assert isinstance(blocks_of(mods.mask, (), values, TileGrid(60, 60, 16, 16, 1, 1), CPU, 1e9), BlockMap)
