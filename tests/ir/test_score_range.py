"""How far from zero scores get: never contradicted by evaluation, known where a cap or a clamp says so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.build import binary, cast, compare, const, input_, scalar, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.score_range import score_extent
from flexc.ir.types import DType

SCORE, KV = input_(Input.SCORE), input_(Input.KV_IDX)
CAPPED = binary(Op.MUL, const(30.0), unary(Op.TANH, binary(Op.DIV, SCORE, const(30.0))))
BY_NUMBER = binary(Op.MUL, scalar(0, DType.F32), unary(Op.TANH, SCORE))
HOSTILE = [0.0, -0.0, 1.0, -1.5, 29.9, -77.0, 1e4, -1e30, 3.4e38, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("score", "extent"),
    [
        (CAPPED, 30.0),
        (unary(Op.NEG, CAPPED), 30.0),
        (binary(Op.ADD, CAPPED, const(2.0)), 32.0),
        (binary(Op.SUB, CAPPED, unary(Op.SIGMOID, SCORE)), 31.0),
        (binary(Op.MAX, binary(Op.MIN, SCORE, const(20.0)), const(-25.0)), 25.0),
        (where(compare(Op.LT, KV, const(5)), CAPPED, const(-40.0)), 40.0),
        (unary(Op.ABS, binary(Op.MUL, CAPPED, const(-0.5))), 15.0),
        (binary(Op.ADD, CAPPED, cast(compare(Op.LT, KV, const(5)), DType.F32)), 31.0),
        (binary(Op.DIV, unary(Op.TANH, SCORE), const(0.25)), 4.0),
    ],
)
def test_known(score: Expr, extent: float) -> None:
    assert score_extent(score) == pytest.approx(extent)


@pytest.mark.parametrize(
    "score",
    [
        SCORE,
        binary(Op.MIN, SCORE, const(20.0)),
        binary(Op.ADD, CAPPED, SCORE),
        binary(Op.ADD, CAPPED, cast(KV, DType.F32)),
        binary(Op.DIV, const(1.0), unary(Op.TANH, SCORE)),
        where(compare(Op.LT, KV, const(5)), CAPPED, const(-math.inf)),
        unary(Op.EXP, SCORE),
        BY_NUMBER,
    ],
)
def test_unknown(score: Expr) -> None:
    assert score_extent(score) == math.inf


@pytest.mark.parametrize(("value", "extent"), [(50.0, 50.0), (-7.0, 7.0), (0.0, 0.0), (math.inf, math.inf)])
def test_captured_numbers(value: float, extent: float) -> None:
    assert score_extent(BY_NUMBER, (value,)) == extent


def test_a_captured_tensor_is_no_number() -> None:
    assert score_extent(BY_NUMBER, (np.float32(1.0).reshape(()),)) == math.inf


def test_an_integer_cap() -> None:
    capped = binary(Op.MUL, cast(scalar(0, DType.I32), DType.F32), unary(Op.TANH, SCORE))
    assert score_extent(capped, (20,)) == 20.0


FLOATS = st.sampled_from([const(x) for x in (-3.0, -0.5, 0.0, 0.25, 2.0, 40.0)])
LEAVES = FLOATS | st.just(SCORE) | st.just(unary(Op.TANH, SCORE)) | st.just(unary(Op.SIGMOID, SCORE))


def _grown(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    two = st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MIN, Op.MAX])
    one = st.sampled_from([Op.NEG, Op.ABS, Op.TANH, Op.SIN, Op.ERF, Op.SIGN, Op.COS, Op.ATAN])
    chosen = st.builds(lambda a, b: where(compare(Op.LT, a, b), a, b), inner, inner)
    return st.builds(binary, two, inner, inner) | st.builds(unary, one, inner) | chosen


@settings(max_examples=300, deadline=None)
@given(st.recursive(LEAVES, _grown, max_leaves=8))
def test_no_score_is_beyond(score: Expr) -> None:
    extent = score_extent(score)
    values: Any = evaluate(score, Env({Input.SCORE: np.array(HOSTILE)}, [], np, np.float64))
    found = np.abs(np.broadcast_to(values, (len(HOSTILE),)))
    assert (np.isnan(found) | (found <= extent * (1 + 1e-9))).all()
