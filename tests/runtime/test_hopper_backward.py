"""Which backwards the Hopper kernels take, and their plans; on any machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.choice import backward_parts, takes_hopper_backward, why_portable_backward
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import BackwardSpec, Entry, backward_spec
from flexc.codegen.hopper_backward_plan import make_hopper_backward_plan, shared_memory
from flexc.codegen.target import TARGETS
from flexc.distances import shares_distances
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
        ({"head_dim": 192, "dropout": True}, "dropout, and a head dimension is above 128"),
        ({"head_dim": 257}, "above 256"),
        ({"head_dim": 128, "head_dim_v": 64}, "different widths"),
        ({"storage": Storage.FP32, "head_dim": 64}, "tiles of 128"),
        ({"storage": Storage.FP32, "head_dim_v": 64}, "tiles of 128"),
        ({"storage": Storage.FP32, "dropout": True}, "dropout, and q is fp32"),
        ({"storage": Storage.FP32, "allow_tf32": True}, "only pairs of fp16"),
        ({"aligned": False}, "16 bytes"),
    ],
)
def test_why_not(facts: dict[str, Any], words: str) -> None:
    why = why_portable_backward(_backward(masks.causal, **facts), "sm90", ())
    assert why is not None
    assert words in why


def _learned(score: Mod) -> BackwardSpec:
    values = resolve(score, None)[1]
    slots = tuple(n for n, x in enumerate(values) if isinstance(x, torch.Tensor) and x.is_floating_point())
    return backward_spec(spec_for(None, score), values, None, slots=slots)


BIAS, RELATIVE = torch.ones(4, 200), scores.relative_bias(torch.ones(4, 399))


LEARNED: dict[str, tuple[Mod, str | None]] = {
    "by_head": (scores.alibi(torch.ones(4)), None),
    "by_distance": (RELATIVE, None),
    "by_key": (lambda s, b, h, q_idx, kv_idx: s + BIAS[h, kv_idx + 1], None),
    "both": (lambda s, b, h, q_idx, kv_idx: RELATIVE(s, b, h, q_idx, kv_idx) + BIAS[h, kv_idx], None),
    "two_keys": (lambda s, b, h, q_idx, kv_idx: s + BIAS[h, kv_idx // 2], "single keys"),
    "by_query": (lambda s, b, h, q_idx, kv_idx: s + BIAS[h, q_idx], "single keys"),
    "by_pair": (lambda s, b, h, q_idx, kv_idx: s + BIAS[q_idx, kv_idx], "single keys"),
    "factor": (lambda s, b, h, q_idx, kv_idx: s + s * BIAS[h, kv_idx], "added to only"),
    "temperature": (scores.temperature(torch.ones(4)), "added to only"),
}


@pytest.mark.parametrize("name", list(LEARNED))
def test_which_captured_tensors_get_gradients(name: str) -> None:
    score, words = LEARNED[name]
    why = why_portable_backward(_learned(score), "sm90", ())
    assert (why is None) if words is None else (words in str(why))
    why = why_portable_backward(replace(_learned(score), deterministic=True), "sm90", ())
    words = "of heads, and deterministic" if name == "by_head" else words
    assert (why is None) if words is None else (words in str(why))


@pytest.mark.parametrize(("width", "shares"), [(9, True), (397, True), (399, False), (801, False)])
def test_a_table_has_an_element_for_each_distance_or_is_left_to_the_portable_kernels(
    width: int, shares: bool
) -> None:
    score = scores.relative_bias(torch.ones(4, width))
    call = problem(*_qkv(), score_mod=score).call
    assert shares_distances(_learned(score), call.values, (200, 200)) is shares
    grad = torch.zeros_like(call.q)
    assert takes_hopper_backward(call, _learned(score), grad, "sm90", "auto") is not shares
    assert takes_hopper_backward(call, _backward(None, score), grad, "sm90", "auto")


def test_buckets_from_a_tensor_may_share_elements() -> None:
    buckets, table = torch.zeros(400, dtype=torch.int32), torch.ones(4, 400)
    score = lambda s, b, h, q_idx, kv_idx: s + table[h, buckets[q_idx - kv_idx + 200]]  # noqa: E731
    assert shares_distances(_learned(score), (buckets, table), (200, 200))


def test_learned_tensors_are_repaired_too() -> None:
    found = backward_parts(replace(_learned(RELATIVE), repairs=False), "sm90", (), hopper=True)
    assert [entry for _, entry in found] == [Entry.ROWS, Entry.HOPPER, Entry.FINISH, Entry.CAPTURED]
    values = resolve(RELATIVE, masks.causal)[1]
    spec = spec_for(masks.causal, RELATIVE)
    slots = tuple(n for n, c in enumerate(spec.captures) if c.is_tensor)
    parts = backward_parts(backward_spec(spec, values, None, slots=slots), "sm90", (), hopper=True)
    # Delta has to be found anew before sums are.
    assert [entry for _, entry in parts[4:]] == [Entry.Q, Entry.KV, Entry.CAPTURED]


def test_why_not_other_gpus_or_map_blocks() -> None:
    found = _backward(masks.causal, scores.alibi(torch.ones(4)))
    assert why_portable_backward(found, "sm90", ()) is None
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


def test_programs_take_one_tile_of_keys_after_another() -> None:
    for mask, dim in product((None, masks.causal), (64, 128)):
        backward = _backward(mask, head_dim=dim)
        for made in (backward, replace(backward, deterministic=True)):
            plan = make_hopper_backward_plan(made, TARGETS["sm90"])
            assert plan.in_rounds
            assert "in_rounds" in dict(plan.reasons)
    for backward in (_backward(head_dim=64, dropout=True), _backward(head_dim=192)):
        assert not make_hopper_backward_plan(backward, TARGETS["sm90"]).in_rounds


@pytest.mark.parametrize("dim", [64, 128])
def test_dropout_takes_tiles_that_leave_registers(dim: int) -> None:
    plan = make_hopper_backward_plan(_backward(head_dim=dim, dropout=True), TARGETS["sm90"])
    assert (plan.tiles.block_q, plan.in_turns, plan.late) == (64, True, True)
    assert "random words" in plan.explain()
    without = make_hopper_backward_plan(_backward(head_dim=dim), TARGETS["sm90"])
    assert "random words" not in without.explain()


@pytest.mark.parametrize("deterministic", [False, True])
def test_dropout_is_no_reason_for_portable_kernels(deterministic: bool) -> None:
    found = replace(_backward(masks.causal, dropout=True), deterministic=deterministic)
    assert why_portable_backward(found, "sm90", ()) is None


def test_repairs_drop_what_the_hopper_kernel_drops() -> None:
    parts = backward_parts(_backward(masks.causal, dropout=True), "sm90", (), hopper=True)
    readers = {Entry.HOPPER, Entry.KV, Entry.Q}
    for spec, entry in parts:
        names = [a.name for a in lower_backward(spec, entry, TARGETS["sm90"]).arguments]
        assert ("seed_ptr" in names) == (entry in readers)


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


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "deterministic", "apart"),
    [
        (192, 128, False, False),
        (136, 40, False, False),
        (192, 128, True, True),
        (192, 192, False, True),
        (64, 136, False, True),
        (256, 256, True, True),
    ],
)
def test_wide_heads(head_dim: int, head_dim_v: int, deterministic: bool, apart: bool) -> None:
    backward = _backward(masks.causal, head_dim=head_dim, head_dim_v=head_dim_v)
    backward = replace(backward, deterministic=deterministic)
    assert why_portable_backward(backward, "sm90", ()) is None
    of_queries = Entry.HOPPER_Q if apart else Entry.FINISH
    parts = backward_parts(backward, "sm90", (), hopper=True)
    assert [entry for _, entry in parts] == [Entry.ROWS, Entry.HOPPER, of_queries, Entry.KV, Entry.Q]
    plan = make_hopper_backward_plan(backward, TARGETS["sm90"])
    assert (plan.apart, plan.in_parts) == (apart, not apart)
    assert (plan.padded_dim, plan.padded_dim_v) == ((256, 256) if apart else (192, 128))
    assert not plan.ordered
    assert plan.shared <= TARGETS["sm90"].shared_memory
    keys_alone = backward_parts(backward, "sm90", (), hopper=True, wants_q=False)
    assert (Entry.HOPPER_Q in [entry for _, entry in keys_alone]) is False


@pytest.mark.parametrize("mask", [None, masks.causal])
def test_single_precision(mask: Mod | None) -> None:
    backward = _backward(mask, storage=Storage.FP32, head_dim=96)
    assert why_portable_backward(backward, "sm90", ()) is None
    parts = backward_parts(backward, "sm90", (), hopper=True)
    repairs = [] if mask is None else [Entry.KV, Entry.Q]
    assert [entry for _, entry in parts] == [
        Entry.ROWS, Entry.PAIRS, Entry.HOPPER, Entry.HOPPER_Q, *repairs
    ]  # fmt: skip
    assert all(of.pairs for of, entry in parts if entry is not Entry.ROWS)
    plan = make_hopper_backward_plan(backward, TARGETS["sm90"])
    assert (plan.pairs, plan.apart, plan.padded_dim) == (True, True, 128)
    assert plan.shared <= TARGETS["sm90"].shared_memory


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("backward_fused", True), "backward_fused"),
        (("precision", "bf16x6"), "bf16x6"),
        (("backward_block_q", 32), "64"),
    ],
)
def test_single_precision_as_asked_for(option: tuple[str, object], words: str) -> None:
    why = why_portable_backward(_backward(masks.causal, storage=Storage.FP32), "sm90", (option,))
    assert why is not None
    assert words in why
