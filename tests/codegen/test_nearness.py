"""Distances in parts: what is rewritten, and that indices may then count from any key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flexc import masks, scores
from flexc.codegen.design import Design
from flexc.codegen.hoisting import mask_form, score_form
from flexc.codegen.nearness import compared_rows, near_form
from flexc.ir.build import binary, cast, compare, const, input_
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType
from tests.codegen.generate import generate, spec_for

Q, KV = (cast(input_(which), DType.F32) for which in (Input.Q_IDX, Input.KV_IDX))
SCORE, H = input_(Input.SCORE), cast(input_(Input.H), DType.F32)


def _value(root: Expr, shift: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    inputs = {
        Input.SCORE: rng.normal(size=(5, 7)).astype(np.float32),
        Input.H: np.int32(3),
        Input.Q_IDX: np.arange(5, dtype=np.int32)[:, None] + shift,
        Input.KV_IDX: np.arange(7, dtype=np.int32)[None, :] + shift,
    }
    value: np.ndarray = evaluate(root, Env(inputs, (), np, np.float32))
    return value


def test_alibi_has_a_part_of_the_row_and_one_of_the_column() -> None:
    score, _ = score_form(spec_for(None, scores.alibi(torch.ones(4))))
    assert score is not None
    found = near_form(score)
    assert found is not None
    assert len(found[1]) == 4


def test_both_indices_may_count_from_anywhere() -> None:
    bent = binary(Op.MUL, binary(Op.SUB, KV, Q), binary(Op.SUB, KV, Q))
    sloped = binary(Op.MUL, H, binary(Op.SUB, KV, Q))
    score = binary(Op.ADD, binary(Op.ADD, SCORE, sloped), bent)
    found = near_form(score)
    assert found is not None
    np.testing.assert_allclose(_value(found[0], 0), _value(score, 0), rtol=1e-6)
    np.testing.assert_allclose(_value(found[0], 1000), _value(score, 0), rtol=1e-3)


def test_other_uses_of_the_indices_are_left_alone() -> None:
    distance = binary(Op.SUB, KV, Q)
    for other in (binary(Op.MUL, Q, const(2.0)), binary(Op.ADD, KV, Q), KV):
        assert near_form(binary(Op.ADD, binary(Op.ADD, SCORE, distance), other)) is None
    assert near_form(SCORE) is None


def test_a_kernel_converts_no_index_of_a_key_in_its_loop() -> None:
    source = generate(masks.causal, scores.alibi(torch.ones(4)), design=Design.HOPPER).source
    assert "kv_idx.to(" not in source
    assert "q_near = q_idx - kv_start" in source


def _rows(mask: Callable[..., Any]) -> tuple[Expr, ...] | None:
    allowed = mask_form(spec_for(mask))
    assert allowed is not None
    return compared_rows(allowed)


def test_keys_that_are_only_compared_with_rows() -> None:
    q = input_(Input.Q_IDX)
    ids = torch.zeros(9, dtype=torch.int32)
    assert _rows(masks.causal) == (q,)
    assert len(_rows(masks.sliding_window(5)) or ()) == 2
    assert _rows(masks.prefix_lm(5)) == (q,)
    assert _rows(masks.document(ids) & masks.causal) == (q,)


def test_keys_that_are_used_in_another_way() -> None:
    def strided(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx) % 4 == 0

    def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx * 1_000_000 >= kv_idx

    assert _rows(strided) is None
    assert _rows(far) is None  # so far from an index that no number may be taken from it


def test_a_query_index_that_a_pair_uses_otherwise_too() -> None:
    q, kv = input_(Input.Q_IDX), input_(Input.KV_IDX)
    page = binary(Op.MOD, kv, const(8))
    allowed = binary(Op.AND, compare(Op.LE, kv, q), compare(Op.LE, page, q))
    assert compared_rows(allowed) is None


def test_a_causal_step_compares_with_numbers() -> None:
    source = generate(masks.causal, design=Design.HOPPER).source
    assert "score = gl.where(kv_on <= q_idx - kv_from, score" in source


@pytest.mark.parametrize("score", [None, scores.softcap(20.0)], ids=["one piece of code", "with a score"])
def test_each_side_of_a_window_applies_where_it_decides(score: Any) -> None:
    source = generate(masks.sliding_window(100), score, design=Design.HOPPER).source
    first = "0, kv_last - kv_first + 1" if score is None else "BLOCK_KV, "
    loop = source[source.index(f"for done in range({first}") :]
    assert loop.index("if kv_start >= full_end:") < loop.index("kv_on <= q_idx - kv_from")
    assert loop.index("if kv_start < full_first:") < loop.index("row_value - kv_from < kv_on")


def test_a_term_that_only_reads_the_key_leaves_the_mask_whole() -> None:
    seen = torch.ones(4, dtype=torch.bool)

    def padded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & seen[kv_idx]

    source = generate(padded, design=Design.HOPPER).source
    assert "mask_mod(q_idx - kv_from, kv_on" in source
