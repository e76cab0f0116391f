"""Trends over the rows, against the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.codegen.monotone import Trend, trend
from flexc.ir.build import binary, cast, compare, const, input_, load, scalar, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType

Q, B, KV_LEN = (input_(i) for i in (Input.Q_IDX, Input.B, Input.KV_LEN))
N, OF_BATCH = scalar(0, DType.I64), load(2, (B,), DType.I32)
ROWS = np.arange(40, dtype=np.int32)
LOADED = np.random.default_rng(0).integers(-9, 30, 40).astype(np.int32)
RISES, FALLS, STAYS = Trend(True, False), Trend(False, True), Trend(False, False)


def _values(root: Expr, n: int, b: int) -> np.ndarray:
    inputs = {Input.Q_IDX: ROWS, Input.B: np.int32(b), Input.KV_LEN: np.int32(33)}
    env = Env(inputs, (n, LOADED, np.array([4, -3], np.int32)), np, np.float64)
    with np.errstate(all="ignore"):
        return np.broadcast_to(evaluate(root, env), ROWS.shape)


def _integers(depth: int) -> st.SearchStrategy[Expr]:
    leaf = st.one_of(
        st.sampled_from([Q, Q, Q, N, KV_LEN, OF_BATCH, load(1, (Q,), DType.I32)]),
        st.integers(-7, 7).map(const),
    )
    if depth == 0:
        return leaf
    inner = _integers(depth - 1)
    divisor = st.one_of(st.sampled_from([-3, 1, 4, 5]).map(const), st.just(binary(Op.MAX, N, const(1))))
    wide = inner.map(lambda x: cast(x, DType.I64))
    return st.one_of(
        leaf,
        st.builds(binary, st.sampled_from([Op.ADD, Op.SUB, Op.MIN, Op.MAX]), inner, inner),
        st.builds(binary, st.just(Op.MUL), wide, inner),
        st.builds(binary, st.sampled_from([Op.FLOORDIV, Op.MOD]), inner, divisor),
        st.builds(lambda x, d: binary(Op.SUB, x, binary(Op.MOD, x, d)), inner, divisor),
        inner.map(lambda x: unary(Op.NEG, x)),
        st.builds(lambda c, x, y: where(compare(Op.LT, c, const(3)), x, y), inner, inner, inner),
    )


@settings(max_examples=400, deadline=None)
@given(root=_integers(3), n=st.integers(-5, 9), b=st.integers(0, 1))
def test_a_trend_is_never_broken(root: Expr, n: int, b: int) -> None:
    steps = np.diff(_values(root, n, b).astype(np.int64))
    found = trend(root)
    assert found.rises or (steps <= 0).all()
    assert found.falls or (steps >= 0).all()


def _multiple(x: Expr, n: Expr) -> Expr:
    return binary(Op.SUB, x, binary(Op.MOD, x, n))


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (binary(Op.ADD, binary(Op.SUB, Q, N), const(1)), RISES),
        (binary(Op.MIN, binary(Op.ADD, Q, const(1)), KV_LEN), RISES),
        (binary(Op.MUL, binary(Op.FLOORDIV, Q, const(64)), const(64)), RISES),
        (_multiple(Q, N), RISES),
        (binary(Op.SUB, binary(Op.ADD, Q, N), binary(Op.MOD, Q, N)), RISES),
        (binary(Op.SUB, const(100), Q), FALLS),
        (binary(Op.MAX, OF_BATCH, const(0)), STAYS),
        (where(compare(Op.LT, OF_BATCH, const(3)), Q, const(0)), RISES),
        (binary(Op.MOD, Q, const(64)), Trend(True, True)),
        (load(1, (Q,), DType.I32), Trend(True, True)),
        (binary(Op.MUL, Q, N), Trend(True, True)),
    ],
)
def test_bounds_that_people_write(root: Expr, expected: Trend) -> None:
    assert trend(root) == expected
