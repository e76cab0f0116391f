"""Bounds never contradict evaluation, and are tight where the docstring says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.errors import InternalError
from flexc.ir.affine import affine_forms
from flexc.ir.arrays import Array
from flexc.ir.build import binary, cast, compare, const, input_, load, logic, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.interval import IntervalEnv, bounds
from flexc.ir.interval_types import Bounds
from flexc.ir.ops import Input, Op
from flexc.ir.range_tables import RangeTables
from flexc.ir.types import DType
from tests.ir.expressions import BATCH, HEADS, booleans, capture_values, floats, integers

Q, KV = input_(Input.Q_IDX), input_(Input.KV_IDX)
Box = tuple[tuple[int, int], tuple[int, int]]


def as_arrays(values: list[Any], xp: Any) -> list[Any]:
    return [xp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]


def bounds_over(root: Expr, box: Box, values: list[Any], xp: Any = np) -> tuple[Any, Any]:
    """Bounds over one box of q and kv, and over all batches and heads."""
    arrays = as_arrays(values, xp)

    def ends(lo: int, hi: int) -> Bounds:
        return Bounds(xp.asarray([lo], dtype=xp.int64), xp.asarray([hi], dtype=xp.int64))

    inputs = {
        Input.Q_IDX: ends(*box[0]),
        Input.KV_IDX: ends(*box[1]),
        Input.B: ends(0, BATCH - 1),
        Input.H: ends(0, HEADS - 1),
    }
    lo, hi = bounds(root, IntervalEnv(inputs, arrays, RangeTables(arrays, xp), xp))
    return (np.asarray(end).reshape(-1)[0] for end in (lo, hi))  # type: ignore[return-value]


def values_over(root: Expr, box: Box, values: list[Any], float_dtype: Any) -> Array:
    inputs = {
        Input.B: np.arange(BATCH, dtype=np.int32)[:, None, None, None],
        Input.H: np.arange(HEADS, dtype=np.int32)[:, None, None],
        Input.Q_IDX: np.arange(box[0][0], box[0][1] + 1, dtype=np.int32)[:, None],
        Input.KV_IDX: np.arange(box[1][0], box[1][1] + 1, dtype=np.int32),
    }
    return np.asarray(evaluate(root, Env(inputs, values, np, float_dtype)))


def boxes() -> st.SearchStrategy[Box]:
    side = st.tuples(st.integers(0, 60), st.sampled_from([0, 1, 3, 7, 15])).map(lambda s: (s[0], s[0] + s[1]))
    return st.tuples(side, side)


@settings(max_examples=300, deadline=None)
@given(root=st.one_of(booleans(4), integers(4), floats(4)), box=boxes(), xp=st.sampled_from([np, torch]))
def test_bounds_hold_every_value(root: Expr, box: Box, xp: Any) -> None:
    values = capture_values(0)
    lo, hi = bounds_over(root, box, values, xp)
    for float_dtype in (np.float32, np.float64):
        seen = values_over(root, box, values, float_dtype)
        if root.dtype is DType.BOOL:
            assert not lo or seen.all()
            assert hi or not seen.any()
            continue
        if np.isnan(seen).any():
            assert (lo, hi) == (-np.inf, np.inf)
        finite = seen[~np.isnan(seen)]
        assert (finite >= lo).all()
        assert (finite <= hi).all()


@pytest.mark.parametrize(
    ("root", "box", "expected"),
    [
        (binary(Op.SUB, binary(Op.ADD, Q, const(3)), Q), ((0, 90), (0, 0)), (3, 3)),
        (binary(Op.SUB, binary(Op.MUL, Q, const(3)), binary(Op.ADD, Q, Q)), ((2, 9), (0, 0)), (2, 9)),
        (binary(Op.MOD, Q, const(16)), ((16, 31), (0, 0)), (0, 15)),
        (binary(Op.MOD, Q, const(16)), ((35, 40), (0, 0)), (3, 8)),
        (binary(Op.FLOORDIV, Q, const(16)), ((16, 40), (0, 0)), (1, 2)),
        (binary(Op.FLOORDIV, binary(Op.SUB, KV, Q), const(4)), ((5, 5), (0, 3)), (-2, -1)),
        (binary(Op.BIT_AND, Q, const(7)), ((9, 12), (0, 0)), (1, 4)),
        (binary(Op.BIT_AND, Q, const(-8)), ((9, 17), (0, 0)), (8, 16)),
        (binary(Op.SHR, Q, const(2)), ((9, 17), (0, 0)), (2, 4)),
        (binary(Op.SHL, Q, const(2)), ((1, 3), (0, 0)), (4, 12)),
        (unary(Op.ABS, binary(Op.SUB, Q, KV)), ((0, 4), (3, 9)), (0, 9)),
        (binary(Op.MAX, binary(Op.MIN, Q, const(10)), const(4)), ((0, 90), (0, 0)), (4, 10)),
        (where(compare(Op.LT, Q, const(50)), Q, KV), ((0, 9), (30, 40)), (0, 9)),
        (binary(Op.MUL, Q, const(2**30)), ((0, 9), (0, 0)), (-(2**31), 2**31 - 1)),
        (cast(compare(Op.LE, KV, Q), DType.I32), ((10, 12), (0, 3)), (1, 1)),
        (compare(Op.LT, binary(Op.ADD, Q, const(1)), Q), ((0, 90), (0, 0)), (False, False)),
        (compare(Op.LE, KV, binary(Op.ADD, KV, const(0))), ((0, 9), (0, 90)), (True, True)),
        (cast(binary(Op.SUB, Q, KV), DType.F32), ((8, 9), (1, 2)), (6.0, 8.0)),
        (binary(Op.MUL, cast(Q, DType.F32), const(0.5)), ((8, 9), (0, 0)), (4.0, 4.5)),
    ],
)
def test_tight(root: Expr, box: Box, expected: tuple[Any, Any]) -> None:
    assert tuple(bounds_over(root, box, [])) == expected


def test_load_of_a_range() -> None:
    ids = np.array([5, 3, 9, 1, 7, 2], np.int32)
    assert tuple(bounds_over(load(0, (Q,), DType.I32), ((1, 3), (0, 0)), [ids])) == (1, 9)
    negative = load(0, (binary(Op.SUB, Q, const(4)),), DType.I32)
    assert tuple(bounds_over(negative, ((1, 2), (0, 0)), [ids])) == (1, 7)
    assert tuple(bounds_over(negative, ((3, 4), (0, 0)), [ids])) == (1, 9)  # from the end and from the start


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 10**6),
    xp=st.sampled_from([np, torch]),
    dtype=st.sampled_from([np.int32, np.bool_, np.float32]),
)
def test_range_tables(shape: tuple[int, ...], seed: int, xp: Any, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 50, shape).astype(dtype) if dtype != np.bool_ else rng.random(shape) < 0.5
    ends = [np.sort(rng.integers(0, n, 2)) for n in shape]
    fixed = rng.random(len(shape)) < 0.5
    index = tuple(
        Bounds(*(xp.asarray([int(e[0] if same else x)]) for x in e))
        for e, same in zip(ends, fixed, strict=True)
    )
    lo, hi = RangeTables([xp.asarray(array)], xp)(0, index)
    box = array[tuple(slice(e[0], (e[0] if same else e[1]) + 1) for e, same in zip(ends, fixed, strict=True))]
    ranges = sum(not same and e[0] != e[1] for e, same in zip(ends, fixed, strict=True))
    got = (int(np.asarray(lo).reshape(-1)[0]), int(np.asarray(hi).reshape(-1)[0]))
    if ranges <= 2:
        assert got == (int(box.min()), int(box.max()))
    else:
        assert got[0] <= int(box.min())
        assert got[1] >= int(box.max())


def test_long_captures_are_cut_into_blocks() -> None:
    ids = np.arange(100_000, dtype=np.int32)
    lo, hi = bounds_over(load(0, (Q,), DType.I32), ((40_000, 40_127), (0, 0)), [ids])
    assert 40_000 - 64 < lo <= 40_000
    assert 40_127 <= hi < 40_127 + 64


def test_affine_forms_follow_sums() -> None:
    root = binary(Op.SUB, binary(Op.MUL, binary(Op.ADD, Q, KV), const(2)), Q)
    form = affine_forms(root)[root]
    assert dict(form.terms) == {Q: 1, KV: 2}
    product = binary(Op.MUL, Q, KV)
    assert affine_forms(product)[product].terms == ((product, 1),)


def test_missing_input() -> None:
    root = logic(Op.AND, compare(Op.LT, Q, KV), compare(Op.LT, Q, input_(Input.Q_LEN)))
    with pytest.raises(InternalError, match="q_len"):
        bounds_over(root, ((0, 1), (0, 1)), [])
