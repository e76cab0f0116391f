"""What depends on the distance of a query and its key only: found, and never found where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from flexc.codegen.diagonals import diagonal_constants
from flexc.codegen.distance import (
    inputs_beside,
    is_of_distance,
    of_distance,
    only_adds_by_distance,
    pair_loads,
    reads_by_distance,
)
from flexc.codegen.tiles import Tiles
from flexc.ir.build import binary, cast, const, input_, load, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.place import Hoists, hoists
from flexc.ir.types import DType
from tests.ir.expressions import BATCH, HEADS, KV_LEN, Q_LEN, capture_values, floats, full_grid

Q, KV, B, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H, Input.SCORE))
N = const(20)
KV_SLOPE = binary(Op.MUL, cast(KV, DType.F32), const(2.0))


def _add(a: Expr, b: Expr) -> Expr:
    return binary(Op.ADD, a, b)


def _less(a: Expr, b: Expr) -> Expr:
    return binary(Op.SUB, a, b)


D = _less(Q, KV)
BIAS = load(0, (H, _add(D, N)), DType.F32)
CLAMPED = load(0, (H, binary(Op.MAX, binary(Op.MIN, _add(D, N), const(7)), const(0))), DType.F32)
BUCKET = load(1, (unary(Op.ABS, D),), DType.I32)
STARTS = load(1, (B,), DType.I32)


@pytest.mark.parametrize(
    "root",
    [
        D,
        _less(_add(Q, N), KV),
        _less(Q, _add(KV, STARTS)),
        _less(binary(Op.MUL, Q, const(3)), binary(Op.MUL, const(3), KV)),
        cast(D, DType.F32),
        _less(cast(Q, DType.F32), cast(KV, DType.F32)),
        _less(cast(_add(Q, N), DType.F32), cast(KV, DType.F32)),
        BIAS,
        CLAMPED,
        load(0, (H, BUCKET), DType.F32),
        H,
    ],
)
def test_what_is_of_the_distance(root: Expr) -> None:
    assert is_of_distance(root)


@pytest.mark.parametrize(
    "root",
    [
        Q,
        _add(Q, KV),
        _add(cast(Q, DType.F32), cast(KV, DType.F32)),
        _less(cast(Q, DType.F32), KV_SLOPE),
        _less(binary(Op.MUL, Q, const(2)), KV),
        binary(Op.MUL, D, Q),
        load(0, (Q, KV), DType.F32),
        _add(BIAS, SCORE),
        binary(Op.FLOORDIV, Q, const(2)),
        _less(binary(Op.FLOORDIV, Q, const(2)), binary(Op.FLOORDIV, KV, const(2))),
    ],
)
def test_what_is_not(root: Expr) -> None:
    assert not is_of_distance(root)


@pytest.mark.parametrize(
    ("root", "parts"),
    [
        (_add(SCORE, BIAS), (BIAS,)),
        (_add(SCORE, binary(Op.MUL, load(2, (H,), DType.F32), BIAS)), "the whole summand"),
        (_add(SCORE, load(0, (H, BUCKET), DType.F32)), (load(0, (H, BUCKET), DType.F32),)),
        (load(0, (BUCKET, Q), DType.F32), (BUCKET,)),
        (_add(SCORE, cast(D, DType.F32)), ()),
        (_add(SCORE, load(0, (Q,), DType.F32)), ()),
        (where(load(3, (unary(Op.ABS, D),), DType.BOOL), SCORE, const(0.0)), ()),
        (BIAS, (BIAS,)),
        (
            load(
                0, (_less(_add(Q, load(1, (Q,), DType.I32)), _add(KV, load(1, (Q,), DType.I32))),), DType.F32
            ),
            (),
        ),
    ],
)
def test_the_largest_parts_that_read_are_taken(root: Expr, parts: tuple[Expr, ...] | str) -> None:
    assert reads_by_distance(root) == ((root.args[1],) if isinstance(parts, str) else parts)


def test_loads_of_pairs() -> None:
    pairs = load(2, (Q, KV), DType.F32)
    assert pair_loads(_add(SCORE, BIAS), None) == 0
    assert pair_loads(_add(SCORE, _add(BIAS, pairs)), None) == 1
    assert pair_loads(_add(SCORE, load(0, (BUCKET, Q), DType.F32)), None) == 1, (
        "its bucket is read by distance"
    )
    assert pair_loads(SCORE, load(3, (unary(Op.ABS, D),), DType.BOOL)) == 1, "of masks nothing is"
    assert pair_loads(None, None) == 0


def test_biases_alone() -> None:
    assert only_adds_by_distance(_add(SCORE, BIAS))
    assert only_adds_by_distance(_add(CLAMPED, SCORE))
    assert not only_adds_by_distance(_add(SCORE, load(2, (Q, KV), DType.F32)))
    assert not only_adds_by_distance(_add(_add(SCORE, BIAS), cast(KV, DType.F32)))
    assert not only_adds_by_distance(binary(Op.MUL, SCORE, BIAS))
    assert not only_adds_by_distance(SCORE)


def test_what_is_computed_elsewhere_is_no_part_of_rows_and_columns() -> None:
    row = load(1, (Q,), DType.I32)
    part = load(0, (_less(_add(Q, row), _add(KV, row)),), DType.F32)
    root = _add(SCORE, part)
    assert row in hoists(root).row
    assert hoists(root, leaves=(part,)) == Hoists(head=(), row=(), column=())
    assert inputs_beside(root, (part,)) == {Input.SCORE}
    assert inputs_beside(_add(root, cast(KV, DType.F32)), (part,)) == {Input.SCORE, Input.KV_IDX}


@given(floats(score=True))
@settings(max_examples=300, deadline=None)
def test_a_value_of_the_distance_is_one_value_a_diagonal(root: Expr) -> None:
    grid = full_grid()
    env = Env({**grid, Input.SCORE: np.float32(1.0)}, capture_values(), np, np.float32)
    for node in of_distance(root, _less(root, load(3, (D,), DType.F32))):
        value = np.broadcast_to(evaluate(node, env), (BATCH, HEADS, Q_LEN, KV_LEN))
        for offset in range(1 - Q_LEN, KV_LEN):
            diagonal = np.diagonal(value, offset, 2, 3)
            np.testing.assert_array_equal(diagonal, np.broadcast_to(diagonal[..., :1], diagonal.shape))


@pytest.mark.parametrize(
    ("sides", "distances", "side"),
    [((64, 64), 128, 32), ((16, 128), 256, 16), ((32, 64), 128, 32), ((16, 16), 32, 16)],
)
def test_constants_hold_every_distance(sides: tuple[int, int], distances: int, side: int) -> None:
    found = diagonal_constants(Tiles(*sides, 4, 1), reads=True, adds=True)
    assert [c.value for c in found] == [distances, side]
    assert distances >= sum(sides) - 1
    assert not diagonal_constants(Tiles(*sides, 4, 1), reads=False, adds=False)
