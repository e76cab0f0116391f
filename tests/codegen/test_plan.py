"""Plans: options, mistakes in them, and that every head dimension has one on every target."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flexc import masks, scores
from flexc.choice import backward_parts
from flexc.codegen.backward_plan import make_backward_plan
from flexc.codegen.backward_spec import Entry, backward_spec
from flexc.codegen.backward_tiles import registers_per_thread
from flexc.codegen.plan import make_plan
from flexc.codegen.refusals import Spilled
from flexc.codegen.target import TARGETS, target_for_capability, target_named
from flexc.codegen.tiles import Tiles, misfit, power_of_two_at_least, shared_memory
from flexc.errors import NoFeasiblePlan, UnknownOption, UnsupportedTarget
from flexc.ir.types import Storage
from tests.codegen.generate import spec_for

HEAD_DIMS = (1, 2, 4, 8, 16, 31, 32, 64, 72, 80, 96, 128, 160, 192, 256, 512)


@pytest.mark.parametrize("storage", [Storage.BF16, Storage.FP32])
@pytest.mark.parametrize("target", list(TARGETS))
def test_every_head_dimension_has_a_plan(target: str, storage: Storage) -> None:
    for dim in HEAD_DIMS:
        for mask in (None, masks.causal):
            spec = spec_for(mask, head_dim=dim, storage=storage, has_sinks=True, return_lse=True)
            plan = make_plan(spec, TARGETS[target])
            assert misfit(spec, TARGETS[target], plan.precision, plan.tiles) is None
            assert plan.padded_dim == power_of_two_at_least(dim)
            assert {name for name, _ in plan.reasons} >= {"block_q", "block_kv", "num_warps", "num_stages"}


@pytest.mark.parametrize("dims", [(512, 16), (16, 512), (192, 128), (1, 512)])
def test_unequal_head_dimensions_have_a_plan(dims: tuple[int, int]) -> None:
    for target in TARGETS.values():
        make_plan(spec_for(head_dim=dims[0], head_dim_v=dims[1]), target)


@pytest.mark.parametrize(("block", "expected"), [(16, 16), (32, 32), (48, 16), (256, 256)])
def test_tiles_divide_the_blocks_of_the_users_map(block: int, expected: int) -> None:
    spec = spec_for(masks.causal, max_block_q=expected, max_block_kv=expected)
    for target in TARGETS.values():
        tiles = make_plan(spec, target).tiles
        assert block % tiles.block_q == block % tiles.block_kv == 0


def test_options_override_and_are_explained() -> None:
    options = {"block_q": 32, "block_kv": 16, "num_warps": 2, "num_stages": 1, "fast_tanh": False}
    plan = make_plan(spec_for(None, scores.softcap(5.0)), TARGETS["sm90"], options)
    assert plan.tiles == Tiles(32, 16, 2, 1)
    assert not plan.fast_tanh
    assert plan.explain().count("asked for") == len(options)


def test_a_kernel_that_was_asked_for_has_a_key_of_its_own() -> None:
    """Tiles that nobody asked for give way to others where they spill: one key may not stand for both."""
    spec, target = spec_for(masks.causal), TARGETS["sm90"]
    plan = make_plan(spec, target)
    asked = make_plan(spec, target, {"block_kv": plan.tiles.block_kv})
    assert asked.tiles == plan.tiles
    assert asked.key() != plan.key()
    assert asked.key() == make_plan(spec, target, {"block_kv": plan.tiles.block_kv}).key()


def test_an_option_alone_leaves_the_others_to_the_plan() -> None:
    for name, value in (("block_q", 16), ("block_kv", 128), ("num_warps", 1), ("num_stages", 2)):
        plan = make_plan(spec_for(head_dim=32), TARGETS["sm80"], {name: value})
        assert plan.value(name) == value


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"block_m": 64}, "unknown option 'block_m'", "block_q, block_kv, num_warps, num_stages"),
        ({"a": 1, "b": 2}, "unknown options 'a', 'b'", "fast_tanh"),
        ({"block_q": 48}, "option block_q is 48", "a power of two from 16 to 256"),
        ({"block_kv": 8}, "option block_kv is 8", "a power of two from 16 to 256"),
        ({"block_q": 64.0}, "option block_q is 64.0", "a power of two"),
        ({"block_q": "64"}, "option block_q is '64'", "a power of two"),
        ({"num_warps": 3}, "option num_warps is 3", "a power of two from 1 to 16"),
        ({"num_warps": True}, "option num_warps is True", "a power of two from 1 to 16"),
        ({"num_stages": 0}, "option num_stages is 0", "an integer from 1 to 8"),
        ({"num_stages": None}, "option num_stages is None", "an integer"),
        ({"precision": "fp8"}, "option precision is 'fp8'", "ieee, tf32, tf32x3"),
        ({"precision": ["ieee"]}, r"option precision is ['ieee']", "ieee"),
        ({"fast_tanh": 1}, "option fast_tanh is 1", "True or False"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UnknownOption, match=re.escape(message)) as caught:
        make_plan(spec_for(), TARGETS["sm90"], options)
    assert hint in (caught.value.hint or "")


def test_what_was_tried_is_listed_when_nothing_fits() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        make_plan(spec_for(head_dim=512), TARGETS["sm89"], {"block_q": 256, "num_stages": 2})
    text = str(caught.value)
    assert "no tiles fit sm89 for plain attention, D=512, bf16" in text
    tried = text.splitlines()[1:-1]
    assert len(tried) > 1
    assert all(re.search(r"256x\d+, \d+ warps, 2 stages: .* there$", line) for line in tried), text
    assert "bytes of shared memory, 101376 there" in text
    assert "smaller tiles" in (caught.value.hint or "")


def test_tiles_that_do_not_divide_the_map_are_refused() -> None:
    spec = spec_for(masks.causal, max_block_q=64, max_block_kv=32)
    with pytest.raises(NoFeasiblePlan, match="the map's blocks are multiples of 64x32 only"):
        make_plan(spec, TARGETS["sm90"], {"block_kv": 64})


def test_tiles_that_proved_bad_are_skipped_and_named() -> None:
    spec = spec_for(masks.causal)
    first = make_plan(spec, TARGETS["sm90"])
    second = make_plan(spec, TARGETS["sm90"], skip={first.tiles: "8 bytes of spilled registers"})
    assert second.tiles != first.tiles
    assert "had 8 bytes of spilled registers" in second.explain()


def test_only_after_spilled_tiles_a_backward_takes_lighter_ones() -> None:
    spec = spec_for(masks.causal, return_lse=True, storage=Storage.FP32)
    backward, target = backward_spec(spec, (), None), TARGETS["sm80"]
    first = make_backward_plan(backward, Entry.KV, target).tiles
    problems = "too large, not spilled", Spilled("too many registers")
    after = [make_backward_plan(backward, Entry.KV, target, skip={first: text}) for text in problems]
    assert all(text in plan.explain() for text, plan in zip(problems, after, strict=True))
    needs = [registers_per_thread(backward, Entry.KV, target, t) for t in (first, *(p.tiles for p in after))]
    assert needs[2] < needs[1] == needs[0]


def test_precision_follows_the_inputs() -> None:
    half, single = spec_for(), spec_for(storage=Storage.FP32)
    tf32 = spec_for(storage=Storage.FP32, allow_tf32=True)
    assert make_plan(half, TARGETS["sm90"]).precision == "ieee"
    assert make_plan(single, TARGETS["sm90"]).precision not in ("ieee", "tf32")
    assert make_plan(tf32, TARGETS["sm90"]).precision == "tf32"
    assert make_plan(single, TARGETS["sm90"], {"precision": "ieee"}).precision == "ieee"


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm120"])
def test_fp32_forwards_multiply_pairs_where_they_can(target: str) -> None:
    single: dict[str, Any] = {"storage": Storage.FP32}
    assert _precision(target, **single) == "fp16x3"
    assert _precision(target, {"precision": "bf16x6"}, **single) == "bf16x6"
    assert _precision(target, head_dim=256, **single) == "bf16x6"
    assert _precision(target, head_dim=4, **single) == "bf16x6"  # a sum of four products is more exact
    assert _precision(target, {"precision": "fp16x3"}, head_dim=4, **single) == "fp16x3"
    with pytest.raises(NoFeasiblePlan, match="up to 128 head dimensions"):
        _precision(target, {"precision": "fp16x3"}, head_dim=256, **single)
    with pytest.raises(NoFeasiblePlan, match="is for fp32"):
        _precision(target, {"precision": "fp16x3"})
    assert _precision(target, few_rows=16, **single) == "bf16x6"
    assert _precision("sm100", **single) == "ieee"
    plan = make_plan(spec_for(**single), TARGETS[target])
    assert plan.rescue_nan  # with no mask too
    assert "precision = fp16x3: each number as two fp16 ones" in plan.explain()


def _precision(target: str, options: dict[str, object] | None = None, **facts: Any) -> str:
    return make_plan(spec_for(**facts), TARGETS[target], options).precision


def test_fp32_backwards_multiply_pairs_where_they_can() -> None:
    plain: dict[str, Any] = {"storage": Storage.FP32}
    assert _entries("sm90", **plain) == (Entry.ROWS, Entry.PAIRS, Entry.Q, Entry.KV)
    assert _entries("sm80", **plain) == (Entry.ROWS, Entry.PAIRS, Entry.FUSED, Entry.Q_SUMS)
    assert _entries("sm90", {"precision": "bf16x6"}, **plain) == (Entry.ROWS, Entry.FUSED, Entry.Q_SUMS)
    assert Entry.PAIRS not in _entries("sm100", **plain)
    assert Entry.PAIRS not in _entries("sm90", head_dim=256, **plain)
    assert Entry.PAIRS not in _entries("sm90", allow_tf32=True, **plain)
    assert Entry.PAIRS not in _entries("sm90")


def _entries(target: str, options: dict[str, object] | None = None, **facts: Any) -> tuple[Entry, ...]:
    wanted = backward_spec(spec_for(**facts), (), None)
    parts = backward_parts(wanted, target, tuple((options or {}).items()), hopper=False)
    entries = tuple(entry for _, entry in parts)
    assert {of.pairs for of, entry in parts if entry is not Entry.ROWS} == {Entry.PAIRS in entries}
    return entries


def test_only_16_bit_inputs_take_the_fast_tanh() -> None:
    softcap = scores.softcap(5.0)
    assert make_plan(spec_for(None, softcap), TARGETS["sm90"]).fast_tanh
    assert not make_plan(spec_for(None, softcap, storage=Storage.FP32), TARGETS["sm90"]).fast_tanh
    assert not make_plan(spec_for(masks.causal), TARGETS["sm90"]).fast_tanh


def test_keys_tell_plans_apart() -> None:
    spec = spec_for(masks.causal)
    plans = [
        make_plan(spec, TARGETS[target], options)
        for target in ("sm80", "sm90")
        for options in ({}, {"num_stages": 1}, {"num_warps": 16, "block_q": 128}, {"precision": "tf32"})
    ]
    assert len({plan.key() for plan in plans}) == len(plans)
    assert make_plan(spec, TARGETS["sm90"]).key() == make_plan(spec, TARGETS["sm90"]).key()


def test_targets() -> None:
    assert target_named("sm90").capability == 90
    with pytest.raises(UnsupportedTarget, match="there is no target 'sm75'") as caught:
        target_named("sm75")
    assert "sm80" in (caught.value.hint or "")
    assert target_for_capability(8, 7).name == "sm86"
    assert target_for_capability(12, 1).name == "sm120"
    for capability in ((7, 5), (11, 0), (13, 0)):
        with pytest.raises(UnsupportedTarget, match=f"compute capability {capability[0]}.{capability[1]}"):
            target_for_capability(*capability)


def test_shared_memory_grows_with_everything_that_it_holds() -> None:
    spec, target = spec_for(masks.causal), TARGETS["sm90"]
    least = shared_memory(spec, target, "ieee", Tiles(32, 32, 4, 1))
    for more in (Tiles(64, 32, 4, 1), Tiles(32, 64, 4, 1), Tiles(32, 32, 4, 3)):
        assert shared_memory(spec, target, "ieee", more) > least
