"""Captured tensors: new contents and lengths are new values, other kinds are traced again."""

from __future__ import annotations

import pytest
import torch

from flexc.ir.types import Storage
from flexc.mods import mask_mod
from tests.frontend.captured import check


def test_new_tensor_is_a_new_value() -> None:
    flags = torch.rand(13) < 0.5

    def mask(b, h, q_idx, kv_idx):
        return flags[kv_idx]

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    flags = torch.rand(13) < 0.5
    again = check(mask, mod.trace())
    assert again.graph is made.graph
    assert again.values[0] is flags
    flags = torch.randint(0, 2, (13, 13)).bool()
    with pytest.raises(Exception, match="returned a tensor"):
        mod.trace()
    flags = torch.rand(13) < 0.5
    assert check(mask, mod.trace()).values[0] is flags


def test_other_dtype_is_traced_again() -> None:
    table = torch.arange(13)

    def mask(b, h, q_idx, kv_idx):
        return table[kv_idx] > q_idx

    mod = mask_mod(mask)
    made = mod.trace()
    table = torch.arange(13).float() + 0.5
    assert check(mask, mod.trace()).graph is not made.graph
    table.data = torch.arange(13, dtype=torch.int16)
    assert check(mask, mod.trace()).graph.captures[0].storage is Storage.I16


def test_one_tensor_is_one_slot_until_it_is_two() -> None:
    rows = columns = torch.rand(13)

    def mask(b, h, q_idx, kv_idx):
        return rows[q_idx] > columns[kv_idx]

    mod = mask_mod(mask)
    assert len(check(mask, mod.trace()).values) == 1
    columns = torch.rand(13)
    assert len(check(mask, mod.trace()).values) == 2


def test_sizes_are_run_time_values() -> None:
    table = torch.rand(6, 13)

    def mask(b, h, q_idx, kv_idx):
        n, _ = table.shape
        return (q_idx < n - 1) | (kv_idx > table.size(1) // 2) | (kv_idx < table.numel() // 20)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    table = torch.rand(9, 7)
    assert check(mask, mod.trace()).graph is made.graph
    table.resize_(2, 3)
    assert check(mask, mod.trace()).graph is made.graph


def test_rank_dtype_and_device_are_constants() -> None:
    table = torch.rand(6, 13)

    def mask(b, h, q_idx, kv_idx):
        assert table.ndim == table.dim() == 2
        assert table.dtype is torch.float32
        assert table.device.type == "cpu"
        assert len(table) == 6
        assert q_idx.shape == ()
        assert q_idx.dtype is torch.int32
        assert q_idx.ndim == 0
        return table[b, kv_idx] > 0.5

    check(mask)


def test_numbers_without_dimensions() -> None:
    limit, scale = torch.tensor(6), torch.nn.Parameter(torch.tensor(0.5))

    def mask(b, h, q_idx, kv_idx):
        return (q_idx < limit) & (scale * kv_idx < torch.sigmoid(scale) * 5) & (-scale < limit)

    made = check(mask)
    assert [capture.rank for capture in made.graph.captures] == [0, 0]


def test_arithmetic_on_whole_tensors_stays_in_the_graph() -> None:
    slopes, offsets = torch.rand(3), torch.tensor([0, 4, 9, 13])

    def mask(b, h, q_idx, kv_idx):
        lengths = offsets[1:] - offsets[:-1]
        steep = (slopes * 2).exp().double()
        return (
            (lengths[h] > kv_idx) | (steep[h] > 3) | (slopes.unsqueeze(0)[0, h] < 0.1) | (offsets[-1] < q_idx)
        )

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made


def test_operations_without_a_form_are_computed_at_every_trace() -> None:
    scores = torch.rand(13)

    def mask(b, h, q_idx, kv_idx):
        outer = scores[:, None] @ scores[None]
        return (scores.cumsum(0)[kv_idx] > torch.sort(scores).values[q_idx]) | (outer[q_idx, kv_idx] < 0.1)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert made.current() is None
    scores.mul_(2)
    check(mask, mod.trace())


def test_strides_are_no_silent_constants() -> None:
    table = torch.rand(3, 4)

    def mask(b, h, q_idx, kv_idx):
        return q_idx < table.stride(0)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    table = torch.rand(3, 7)
    check(mask, mod.trace())


def test_tensors_made_in_the_mod() -> None:
    def mask(b, h, q_idx, kv_idx):
        lookup = torch.tensor([1, 3, 2, 7])
        base = torch.arange(4) * 2
        shape = q_idx.new_zeros((2,)) + torch.ones(2, dtype=torch.int32)
        return (lookup[kv_idx % 4] > base[q_idx % 4]) & (shape.sum() == 2) & torch.eye(3)[h, b].bool()

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made
