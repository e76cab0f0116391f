"""What the softmax takes over from a score, and that the score is still the same."""

from __future__ import annotations

import numpy as np
import pytest

from flexc import scores
from flexc.codegen.design import Design
from flexc.codegen.softmax_form import softmax_form, summands
from flexc.ir.build import binary, cast, const, input_, scalar, unary
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.types import DType
from tests.codegen.generate import generate

Q, KV = (cast(input_(which), DType.F32) for which in (Input.Q_IDX, Input.KV_IDX))
SCORE, H = input_(Input.SCORE), cast(input_(Input.H), DType.F32)


def _value(root: Expr) -> np.ndarray:
    inputs = {
        Input.SCORE: np.random.default_rng(0).normal(size=(5, 7)),
        Input.H: np.int32(3),
        Input.Q_IDX: np.arange(5, dtype=np.int32)[:, None],
        Input.KV_IDX: np.arange(7, dtype=np.int32)[None, :],
    }
    value: np.ndarray = evaluate(root, Env(inputs, (), np, np.float64))
    return value


def _minus(a: Expr, b: Expr) -> Expr:
    return binary(Op.SUB, a, b)


@pytest.mark.parametrize(
    ("score", "has_row", "factor"),
    [
        (SCORE, False, 1.0),
        (binary(Op.ADD, SCORE, Q), True, 1.0),
        (binary(Op.ADD, SCORE, _minus(KV, Q)), True, 1.0),
        (_minus(Q, _minus(SCORE, unary(Op.NEG, Q))), True, 1.0),
        (binary(Op.MUL, const(3.0), binary(Op.ADD, SCORE, Q)), True, 3.0),
        (binary(Op.MUL, binary(Op.MUL, SCORE, const(2.0)), const(3.0)), False, 6.0),
        (binary(Op.MUL, const(-3.0), SCORE), False, 1.0),
        (binary(Op.MUL, H, binary(Op.ADD, SCORE, Q)), False, 1.0),
        (binary(Op.ADD, SCORE, H), False, 1.0),
        (binary(Op.MUL, SCORE, Q), False, 1.0),
        (Q, False, 1.0),
    ],
)
def test_the_parts_make_up_the_score(score: Expr, has_row: bool, factor: float) -> None:
    form = softmax_form(score)
    assert form.factor == factor
    assert (form.row is not None) == has_row
    assert form.score is not None
    total = _value(form.score)
    if form.row is not None:
        assert place(form.row)[form.row] is Placement.ROW
        total = total + _value(form.row)
    np.testing.assert_allclose(
        np.broadcast_to(total * factor, (5, 7)), np.broadcast_to(_value(score), (5, 7))
    )


def test_summands() -> None:
    assert summands(_minus(SCORE, _minus(KV, Q))) == [SCORE, KV, Q]


@pytest.mark.parametrize("cap", [30.0, -2.0, 0.0])
def test_a_soft_cap_is_a_factor_of_the_softmax(cap: float) -> None:
    number, rest = scalar(0, DType.F32), unary(Op.TANH, SCORE)
    form = softmax_form(binary(Op.MUL, number, rest))
    assert form.score is rest
    assert form.size is not None
    assert form.scale(None) is form.sign
    inside = form.scale(const(0.5))
    assert inside is not None
    env = Env({Input.SCORE: np.linspace(-3, 3, 7)}, (np.float64(cap),), np, np.float64)
    size, scale = (evaluate(part, env) for part in (form.size, inside))
    assert size > 0
    x = env.inputs[Input.SCORE]
    np.testing.assert_allclose(np.tanh(x * scale) * size, cap * np.tanh(x * 0.5), atol=1e-20)


def test_a_soft_cap_of_a_kernel() -> None:
    source = generate(None, scores.softcap(30.0), design=Design.HOPPER).source
    assert "return tanh(score)\n" in source
    assert "to_log2 = LOG2E * head_value" in source
