"""Which backwards the Hopper kernels take, and their plans; on any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.choice import backward_parts, takes_hopper_backward, why_portable_backward
from flexc.codegen.backward_spec import BackwardSpec, Entry, backward_spec
from flexc.codegen.hopper_backward_plan import make_hopper_backward_plan, shared_memory
from flexc.codegen.target import TARGETS
from flexc.errors import NoFeasiblePlan
from flexc.ir.spec import Blocks
from flexc.ir.types import Storage
from flexc.resolve import resolve
from tests.codegen.generate import Mod, spec_for
from tests.gradients import problem


def _backward(mask: Mod | None = None, score: Mod | None = None, **facts: Any) -> BackwardSpec:
    return backward_spec(spec_for(mask, score, **facts), resolve(score, mask)[1], None)


def _qkv(q_len: int = 200, kv_len: int = 200, dim: int = 128) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(1, 4, q_len, dim, dtype=torch.bfloat16),
        *(torch.zeros(1, 2, kv_len, dim, dtype=torch.bfloat16) for _ in range(2)),
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"head_dim": 192}, "above 128"),
        ({"head_dim": 128, "head_dim_v": 64}, "different widths"),
        ({"storage": Storage.FP32}, "16-bit"),
        ({"dropout": True}, "dropout"),
        ({"aligned": False}, "16 bytes"),
    ],
)
def test_why_not(facts: dict[str, Any], words: str) -> None:
    why = why_portable_backward(_backward(masks.causal, **facts), "sm90", ())
    assert why is not None
    assert words in why


def test_why_not_gradients_of_captures_other_gpus_or_map_blocks() -> None:
    found = _backward(masks.causal, scores.alibi(torch.ones(4)))
    assert why_portable_backward(found, "sm90", ()) is None
    assert "captured" in str(why_portable_backward(replace(found, slots=(0,)), "sm90", ()))
    assert "sm90" in str(why_portable_backward(found, "sm80", ()))
    small = replace(found, forward=replace(found.forward, max_block_kv=64), kv_blocks=Blocks.MAP)
    assert "64 only" in str(why_portable_backward(small, "sm90", ()))


def test_calls_that_are_left_to_the_portable_kernels() -> None:
    call = problem(*_qkv(), mask_mod=masks.causal).call
    found, grad = _backward(masks.causal), torch.zeros_like(call.q)
    assert takes_hopper_backward(call, found, grad, "sm90", "auto")
    assert takes_hopper_backward(call, found, grad, "sm90", "hopper")
    assert not takes_hopper_backward(call, found, grad, "sm90", "triton")
    assert takes_hopper_backward(replace(call, deterministic=True), found, grad, "sm90", "auto")
    expanded = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(1, 4, 200, 128)
    assert takes_hopper_backward(call, found, expanded, "sm90", "auto")
    few = problem(*_qkv(q_len=20), mask_mod=masks.causal).call
    assert not takes_hopper_backward(few, found, torch.zeros_like(few.q), "sm90", "auto")


def test_bounds_that_are_no_function_of_one_key_come_from_a_map() -> None:
    cases = ((None, Blocks.ALL), (masks.causal, Blocks.RANGES), (masks.natten2d(20, 10, 3), Blocks.MAP))
    for mask, blocks in cases:
        found = backward_parts(_backward(mask), "sm90", (), hopper=True)
        (main,) = (spec for spec, entry in found if entry is Entry.HOPPER)
        assert main.blocks(Entry.HOPPER) is blocks
        assert [entry for spec, entry in found if spec.repairs] == (
            [] if mask is None else [Entry.KV, Entry.Q]
        )


def test_deterministic_ones_add_dq_up_in_order() -> None:
    def two(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 200) | (kv_idx < 100))

    cases = ((None, Blocks.ALL), (masks.causal, Blocks.RANGES), (two, Blocks.MAP))
    for mask, blocks in cases:
        found = replace(_backward(mask), deterministic=True)
        assert why_portable_backward(found, "sm90", ()) is None
        parts = backward_parts(found, "sm90", (), hopper=True)
        (main,) = (spec for spec, entry in parts if entry is Entry.HOPPER)
        # Of several ranges, those that a row sees are no neighbours: a map says who is next.
        assert main.blocks(Entry.HOPPER) is blocks
        assert all(spec.deterministic for spec, _ in parts)
        plan = make_hopper_backward_plan(main, TARGETS["sm90"])
        assert plan.ordered
        assert "deterministic: a tile of dQ" in plan.explain()
        assert (
            plan.key() != make_hopper_backward_plan(replace(main, deterministic=False), TARGETS["sm90"]).key()
        )
    assert not make_hopper_backward_plan(_backward(masks.causal), TARGETS["sm90"]).ordered


@pytest.mark.parametrize("dim", [64, 128])
def test_plans_fit(dim: int) -> None:
    backward = _backward(masks.causal, scores.softcap(3.0), head_dim=dim)
    plan = make_hopper_backward_plan(backward, TARGETS["sm90"])
    assert shared_memory(backward, plan.tiles) == plan.shared <= TARGETS["sm90"].shared_memory
    assert "block_q" in plan.explain()
    with pytest.raises(NoFeasiblePlan, match="do not fit the registers"):
        make_hopper_backward_plan(
            _backward(head_dim=128), TARGETS["sm90"], {"backward_block_q": 128, "backward_num_stages": 4}
        )
