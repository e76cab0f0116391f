"""Which scores are a slope over the keys, and which kernels scale rows to their first keys' largest score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flexc import masks, scores
from flexc.codegen.design import Design
from flexc.codegen.hopper_plan import is_guessed, make_hopper_plan
from flexc.codegen.hopper_score import hopper_score
from flexc.codegen.target import TARGETS
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input
from flexc.ir.spec import Blocks
from flexc.ir.types import Storage
from tests.codegen.generate import generate, spec_for

Mod = Callable[..., Any]
SLOPES = torch.tensor([0.5, -0.25])
ALIBI = scores.alibi(SLOPES)


def _towards_later(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.5 * (q_idx - kv_idx)


def _towards_earlier(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx) * 0.5 + score


def _distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx)


def _both_ways(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.5 * (q_idx - kv_idx).abs()


def _and_of_the_key(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.5 * (kv_idx - q_idx) + SLOPES[kv_idx % 2]


def _capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.tanh(score) + 0.5 * (kv_idx - q_idx)


def _two_stretches(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 128) | (kv_idx < 64))


def _slope(score: Mod) -> Expr | None:
    return hopper_score(spec_for(masks.causal, score), packed=False, by_row=True).slope


@pytest.mark.parametrize(
    ("score", "rises_by"), [(_towards_later, 0.5), (_towards_earlier, -0.5), (_distance, 1.0)]
)
def test_slopes(score: Mod, rises_by: float) -> None:
    slope = _slope(score)
    assert slope is not None
    assert float(evaluate(slope, Env({}, (), np, np.float32))) == rises_by


def test_the_slope_of_a_head() -> None:
    slope = _slope(ALIBI)
    assert slope is not None
    env = Env({Input.H: np.int32(1)}, (SLOPES.numpy(),), np, np.float32)
    assert float(evaluate(slope, env)) == -0.25


@pytest.mark.parametrize("score", [_both_ways, _and_of_the_key, _capped, scores.softcap(30.0)])
def test_other_scores_have_none(score: Mod) -> None:
    assert _slope(score) is None


@pytest.mark.parametrize("score", [None, ALIBI, _towards_later])
def test_a_guess_serves_masks_and_slopes_under_masks(score: Mod | None) -> None:
    spec = spec_for(masks.causal, score, head_dim=64)
    assert is_guessed(spec)
    plan = make_hopper_plan(spec, TARGETS["sm90"])
    assert (plan.consumers, plan.turns, plan.guessed) == (3, True, True)


@pytest.mark.parametrize(
    "facts",
    [
        {"storage": Storage.FP16},
        {"has_sinks": True},
        {"dropout": True},
        {"score": ALIBI, "positive_scale": False},
        {"score": _both_ways},
        {"few_rows": 16, "packed_heads": 4},
        {"score": ALIBI, "blocks": Blocks.MAP},
    ],
    ids=["short_range", "sinks", "dropout", "any_scale", "other_score", "rows_of_heads", "slopes_of_a_map"],
)
def test_no_guess_elsewhere(facts: dict[str, Any]) -> None:
    assert not is_guessed(spec_for(masks.causal, facts.pop("score", None), **facts))


@pytest.mark.parametrize(("head_dim", "turns"), [(64, True), (128, False)])
def test_a_guess_serves_maps_by_two_warpgroups(head_dim: int, turns: bool) -> None:
    spec = spec_for(masks.causal, head_dim=head_dim, blocks=Blocks.MAP)
    plan = make_hopper_plan(spec, TARGETS["sm90"])
    assert (plan.consumers, plan.turns, plan.guessed) == (2, turns, True)


def test_no_guess_where_rows_cannot_be_computed_again() -> None:
    assert not is_guessed(spec_for())


@pytest.mark.parametrize(("mask", "begin"), [(masks.causal, True), (_two_stretches, False)])
def test_sums_of_products_begin_with_slopes_where_the_next_keys_are_known(mask: Mod, begin: bool) -> None:
    source = generate(mask, ALIBI, design=Design.HOPPER, head_dim=64).source
    assert ("permute((1, 0)), score, is_async=True)" in source) is begin
    assert ("to_products" in source) is begin
