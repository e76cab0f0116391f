"""Distances in parts: what is rewritten, and that indices may then count from any key."""

from __future__ import annotations

import numpy as np
import torch

from flexc import masks, scores
from flexc.codegen.design import Design
from flexc.codegen.hoisting import score_form
from flexc.codegen.nearness import near_form
from flexc.ir.build import binary, cast, const, input_
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
