"""A mask found in a score function, and a mask taken apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from flexc.ir.build import FALSE, TRUE, binary, compare, const, input_, load, logic, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.split import conjuncts, split_score
from flexc.ir.types import DType
from tests.ir.expressions import booleans, capture_values, full_grid

Q, KV, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.H, Input.SCORE))
INF = const(-math.inf)
CAUSAL = compare(Op.LE, KV, Q)
FIRST = compare(Op.EQ, H, const(0))
MASKED = where(CAUSAL, SCORE, INF)
SLOPE = load(3, (H,), DType.F32)
HALF = binary(Op.MUL, SCORE, const(0.5))


@pytest.mark.parametrize(
    ("root", "score", "mask"),
    [
        (MASKED, SCORE, CAUSAL),
        (where(CAUSAL, INF, SCORE), SCORE, compare(Op.LT, Q, KV)),
        (binary(Op.ADD, SCORE, where(CAUSAL, const(0.0), INF)), SCORE, CAUSAL),
        (binary(Op.MUL, MASKED, const(0.5)), HALF, CAUSAL),
        (binary(Op.ADD, MASKED, SLOPE), binary(Op.ADD, SCORE, SLOPE), CAUSAL),
        (where(FIRST, MASKED, INF), SCORE, logic(Op.AND, FIRST, CAUSAL)),
        (where(FIRST, binary(Op.MUL, MASKED, const(0.5)), SCORE), where(FIRST, HALF, SCORE),
         logic(Op.OR, logic(Op.AND, FIRST, CAUSAL), compare(Op.NE, H, const(0)))),
        (INF, const(0.0), FALSE),
        (SCORE, SCORE, None),
        (binary(Op.MUL, MASKED, const(-1.0)), unary(Op.NEG, MASKED), None),
        (binary(Op.MUL, MASKED, SLOPE), binary(Op.MUL, MASKED, SLOPE), None),
        (binary(Op.SUB, SCORE, MASKED), binary(Op.SUB, SCORE, MASKED), None),
        (unary(Op.EXP, MASKED), unary(Op.EXP, MASKED), None),
        (binary(Op.MAX, MASKED, const(0.0)), binary(Op.MAX, MASKED, const(0.0)), None),
        (where(compare(Op.LT, SCORE, const(0.0)), INF, SCORE),
         where(compare(Op.LT, SCORE, const(0.0)), INF, SCORE), None),
        (where(CAUSAL, SCORE, const(-1e9)), where(CAUSAL, SCORE, const(-1e9)), None),
    ],
)  # fmt: skip
def test_split(root: Expr, score: Expr, mask: Expr | None) -> None:
    assert split_score(root) == (score, mask)


@settings(max_examples=100, deadline=None)
@given(one=booleans(2), two=booleans(2))
def test_split_keeps_meaning(one: Expr, two: Expr) -> None:
    inner = binary(Op.ADD, where(one, SCORE, INF), SLOPE)
    root = binary(Op.MUL, where(two, inner, binary(Op.ADD, SCORE, where(one, INF, const(1.0)))), const(2.0))
    score, mask = split_score(root)
    assert mask is not None
    env = Env(full_grid() | {Input.SCORE: np.float32(0.25)}, capture_values(0), np, np.float32)
    expected = evaluate(root, env)
    got = np.where(evaluate(mask, env), evaluate(score, env), np.float32(-np.inf))
    np.testing.assert_array_equal(
        np.broadcast_to(got, (2, 3, 23, 19)), np.broadcast_to(expected, (2, 3, 23, 19))
    )


def test_conjuncts() -> None:
    near = compare(Op.LT, binary(Op.SUB, Q, KV), const(9))
    less = compare(Op.LT, load(3, (H,), DType.F32), const(0.0))
    assert conjuncts(logic(Op.AND, logic(Op.AND, CAUSAL, near), CAUSAL)) == (CAUSAL, near)
    assert conjuncts(unary(Op.NOT, logic(Op.OR, less, CAUSAL))) == (
        unary(Op.NOT, less),
        compare(Op.LT, Q, KV),
    )
    assert conjuncts(TRUE) == ()
    assert conjuncts(FALSE) == (FALSE,)


@settings(max_examples=100, deadline=None)
@given(mask=booleans(3))
def test_conjuncts_are_the_mask(mask: Expr) -> None:
    whole = TRUE
    for part in conjuncts(mask):
        whole = logic(Op.AND, whole, part)
    env = Env(full_grid(), capture_values(0), np, np.float64)
    before, after = (np.broadcast_to(evaluate(x, env), (2, 3, 23, 19)) for x in (mask, whole))
    np.testing.assert_array_equal(after, before)
