"""How many queries see a key, as the host knows it, and which tiles that decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexc import masks
from flexc.choice import backward_parts
from flexc.codegen.backward_spec import BackwardSpec, Entry, backward_spec
from flexc.codegen.hopper_backward_plan import make_hopper_backward_plan, suited
from flexc.codegen.target import TARGETS
from flexc.resolve import resolve
from tests.codegen.generate import Mod, spec_for

IDS = torch.arange(900, dtype=torch.int32) // 70
WIDTH = torch.tensor(100)


def _documents_or_near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (IDS[q_idx] == IDS[kv_idx]) | (q_idx - kv_idx < 10)


def _shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= q_idx + 5) & (kv_idx < q_idx + 517)


def _as_wide_as_a_tensor(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < IDS.shape[0] // 4)


def _as_wide_as_its_number(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WIDTH)


def _spec(mask: Mod | None, head_dim: int = 64, **facts: Any) -> BackwardSpec:
    return backward_spec(spec_for(mask, head_dim=head_dim), resolve(None, mask)[1], None, **facts)


@pytest.mark.parametrize(
    ("mask", "few"),
    [
        (None, False),
        (masks.causal, False),
        (masks.prefix_lm(100), False),
        (masks.sliding_window(512) & masks.causal, True),
        (masks.sliding_window(513) & masks.causal, False),
        (masks.sliding_window(300), True),
        (_shifted, True),
        (masks.document(IDS), True),
        (masks.document(IDS) & masks.causal, True),
        (_documents_or_near, False),
        (_as_wide_as_a_tensor, True),
        (_as_wide_as_its_number, False),  # which would have to be read from memory
    ],
)
def test_few_queries_see_a_key(mask: Mod | None, few: bool) -> None:
    assert _spec(mask).short is few


def test_short_programs_have_one_warpgroup() -> None:
    mask = masks.document(IDS) & masks.causal
    for head_dim in (40, 64):
        plan = make_hopper_backward_plan(suited(_spec(mask, head_dim)), TARGETS["sm90"])
        assert (plan.tiles.block_q, plan.tiles.block_kv, plan.groups) == (64, 64, 1)
        assert plan.max_registers == 128
        assert 2 * (plan.shared + 1024) <= 228 * 1024, "two programs fit"
        assert plan.dq_columns == plan.padded_dim
    long = make_hopper_backward_plan(suited(_spec(masks.causal)), TARGETS["sm90"])
    assert (long.groups, long.max_registers) == (2, None)


def test_short_programs_of_wide_heads_have_two() -> None:
    mask = masks.sliding_window(100)
    for spec, groups in ((_spec(mask, deterministic=True), 1), (_spec(mask, 128), 2)):
        assert spec.short
        assert make_hopper_backward_plan(suited(spec), TARGETS["sm90"]).groups == groups


def test_only_the_large_kernel_and_the_last_differ() -> None:
    mask = masks.document(IDS)
    parts = backward_parts(_spec(mask), "sm90", (), hopper=True)
    assert {entry: spec.short for spec, entry in parts} == {
        Entry.ROWS: False, Entry.HOPPER: True, Entry.FINISH: True, Entry.KV: False, Entry.Q: False,
    }  # fmt: skip
