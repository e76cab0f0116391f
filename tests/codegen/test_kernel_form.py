"""Rewrites into the form of a kernel: what they do, and that they keep the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexc.codegen.kernel_form import (
    SHORT,
    fold_scale,
    multiply_by_reciprocals,
    separate_comparisons,
    split_index_casts,
)
from flexc.ir.build import binary, cast, compare, const, input_, load, scalar, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.printer import to_text
from flexc.ir.simplify import simplify
from flexc.ir.types import DType
from tests.ir.expressions import booleans, capture_values, floats, full_grid

Q, KV, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.H, Input.SCORE))
WINDOW, RATE = scalar(0, DType.I32), scalar(5, DType.F32)
SLOPE = load(3, (H,), DType.F32)
DISTANCE = binary(Op.SUB, Q, KV)
INPUTS = {**full_grid(), Input.SCORE: np.linspace(-4, 4, 23 * 19).reshape(1, 1, 23, 19)}


def _value(root: Expr, float_dtype: Any = np.float64) -> Any:
    return evaluate(root, Env(INPUTS, capture_values(), np, float_dtype))


def _same(before: Expr, after: Expr) -> None:
    np.testing.assert_allclose(_value(before), _value(after), rtol=1e-9, atol=1e-9)


def _element_ops(root: Expr) -> list[Op]:
    return [node.op for node, level in place(root).items() if level is Placement.ELEMENT]


def test_index_casts_move_to_rows_and_columns() -> None:
    bias = binary(Op.MUL, SLOPE, cast(unary(Op.ABS, DISTANCE), DType.F32))
    form = split_index_casts(bias)
    assert Op.CAST not in _element_ops(form)
    _same(bias, form)


@pytest.mark.parametrize(
    "index",
    [
        binary(Op.MUL, Q, KV),  # may exceed what a float holds
        binary(Op.ADD, Q, binary(Op.ADD, KV, const(SHORT))),
        binary(Op.SUB, binary(Op.FLOORDIV, Q, const(3)), KV),
        binary(Op.ADD, DISTANCE, WINDOW),
    ],
)
def test_index_casts_that_may_round_stay(index: Expr) -> None:
    root = cast(index, DType.F32)
    assert split_index_casts(root) is root


@pytest.mark.parametrize(("q", "kv"), [(SHORT - 1, 0), (0, SHORT - 1), (SHORT - 1, SHORT - 2)])
def test_index_casts_are_exact_below_the_limit(q: int, kv: int) -> None:
    literal = binary(Op.ADD, binary(Op.ADD, Q, const(SHORT - 1)), KV)
    for index in (DISTANCE, binary(Op.ADD, Q, KV), unary(Op.ABS, DISTANCE), literal):
        root = cast(index, DType.F32)
        inputs = {Input.Q_IDX: np.int32(q), Input.KV_IDX: np.int32(kv)}
        env = Env(inputs, (), np, np.float32)
        assert evaluate(split_index_casts(root), env) == evaluate(root, env)


def test_divisions_by_what_is_known_early_become_products() -> None:
    for divisor in (const(30.0), SLOPE, RATE, cast(binary(Op.ADD, KV, const(1)), DType.F32)):
        root = unary(Op.EXP, binary(Op.DIV, SCORE, divisor))
        form = multiply_by_reciprocals(root)
        assert Op.DIV not in _element_ops(form)
        _same(root, form)


def test_divisions_without_a_lower_level_stay() -> None:
    for root in (
        binary(Op.DIV, const(1.0), SCORE),
        binary(Op.DIV, SLOPE, RATE),
        binary(Op.DIV, SCORE, cast(DISTANCE, DType.F32)),
        binary(Op.DIV, SCORE, const(0.0)),
        binary(Op.DIV, SCORE, const(float("inf"))),
    ):
        assert multiply_by_reciprocals(root) is root


@pytest.mark.parametrize("tiny", [1e-39, 1e-44, 1e39, 3e38])
def test_no_reciprocal_outside_the_range_of_floats(tiny: float) -> None:
    root = binary(Op.DIV, SCORE, const(tiny))
    assert multiply_by_reciprocals(root) is root


def test_divisions_that_decide_something_stay_exact() -> None:
    """49 * (1 / 49) is below 1, so a floor, a comparison or an index must see the quotient itself."""
    quotient = binary(Op.DIV, cast(Q, DType.F32), const(49.0))
    for decided in (
        unary(Op.FLOOR, quotient),
        cast(cast(quotient, DType.I32), DType.F32),
        where(compare(Op.LE, const(1.0), quotient), SCORE, const(0.0)),
        load(3, (cast(quotient, DType.I32),), DType.F32),
        unary(Op.SIGN, binary(Op.SUB, quotient, const(1.0))),
    ):
        root = binary(Op.ADD, SCORE, decided)
        assert multiply_by_reciprocals(root) is root, to_text(root)


def test_a_factor_of_every_use_joins_the_scale() -> None:
    softcap = binary(Op.MUL, const(30.0), unary(Op.TANH, binary(Op.MUL, SCORE, const(1 / 30.0))))
    form, factor = fold_scale(softcap)
    assert form is binary(Op.MUL, const(30.0), unary(Op.TANH, SCORE))
    assert factor is const(1 / 30.0)
    for known in (RATE, SLOPE):
        product = binary(Op.MUL, known, SCORE)
        assert fold_scale(binary(Op.ADD, product, unary(Op.EXP, product))) == (
            binary(Op.ADD, SCORE, unary(Op.EXP, SCORE)),
            known,
        )


@pytest.mark.parametrize(
    "root",
    [
        SCORE,
        const(1.0),
        binary(Op.ADD, SCORE, SLOPE),
        binary(Op.MUL, SCORE, SCORE),
        binary(Op.ADD, SCORE, binary(Op.MUL, SCORE, RATE)),
        binary(Op.ADD, binary(Op.MUL, SCORE, SLOPE), binary(Op.MUL, SCORE, RATE)),
        binary(Op.MUL, SCORE, cast(Q, DType.F32)),
    ],
)
def test_no_factor_is_taken_out_of_a_mixed_score(root: Expr) -> None:
    assert fold_scale(root) == (root, None)


def test_comparisons_are_separated_into_row_and_column() -> None:
    window = compare(Op.LT, DISTANCE, WINDOW)
    form = separate_comparisons(window)
    assert form is compare(Op.LT, binary(Op.SUB, Q, WINDOW), KV)
    _same(window, form)
    below = compare(Op.LE, binary(Op.SUB, KV, Q), unary(Op.NEG, WINDOW))
    assert separate_comparisons(below) is compare(Op.LE, KV, binary(Op.SUB, Q, WINDOW))


@pytest.mark.parametrize("op", [Op.LT, Op.LE, Op.EQ, Op.NE])
def test_one_operation_is_left_per_element(op: Op) -> None:
    for left in (DISTANCE, binary(Op.SUB, KV, Q), binary(Op.ADD, Q, KV), unary(Op.NEG, DISTANCE)):
        root = compare(op, left, binary(Op.ADD, WINDOW, const(2)))
        form = separate_comparisons(root)
        assert len(_element_ops(form)) == 1
        _same(root, form)


@pytest.mark.parametrize(
    "root",
    [
        compare(Op.LT, DISTANCE, scalar(0, DType.I64)),
        compare(Op.LT, DISTANCE, const(2**31 - 1)),
        compare(Op.LT, DISTANCE, load(1, (Q,), DType.I32)),
        compare(Op.LT, binary(Op.MUL, Q, KV), WINDOW),
        compare(Op.EQ, compare(Op.LT, Q, KV), compare(Op.LT, KV, WINDOW)),
    ],
)
def test_comparisons_that_may_overflow_stay(root: Expr) -> None:
    assert separate_comparisons(root) is root


@given(booleans())
@settings(max_examples=150, deadline=None)
def test_masks_keep_their_value(mask: Expr) -> None:
    mask = simplify(mask)
    assert np.array_equal(_value(mask), _value(separate_comparisons(mask)))


@given(floats(score=True), st.booleans())
@example(unary(Op.NEG, binary(Op.MUL, scalar(5, DType.F32), binary(Op.MUL, const(0.0), SCORE))), False)
@example(binary(Op.DIV, SCORE, cast(input_(Input.B), DType.F32)), False)
@settings(max_examples=200, deadline=None)
def test_scores_keep_their_value(score: Expr, simple: bool) -> None:
    score = simplify(score) if simple else score
    form = multiply_by_reciprocals(split_index_casts(score))
    folded, factor = fold_scale(form)
    expected, actual = _value(score), _value(form)
    # In 64 bits only; what a division by zero gives may change its sign or be NaN.
    known = np.isfinite(expected) & (np.abs(expected) < 1e12)
    np.testing.assert_allclose(np.where(known, expected, 0), np.where(known, actual, 0), rtol=1e-6, atol=1e-6)
    if factor is not None:
        with np.errstate(invalid="ignore"):  # 0 * (1 / 0), where nothing is known
            scaled = {**INPUTS, Input.SCORE: INPUTS[Input.SCORE] * _value(factor)}
        refolded = evaluate(folded, Env(scaled, capture_values(), np, np.float64))
        np.testing.assert_allclose(np.where(known, refolded, 0), np.where(known, actual, 0), rtol=1e-6)
        assert all(SCORE not in node.args or node.op is not Op.MUL for node in topological(folded))
