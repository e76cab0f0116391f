"""Expressions in generated kernels, run by Triton's interpreter, against `ir.evaluate`.

Each query row sees one key, so that its log-sum-exp is the score of that pair.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from flexc.call import AttentionCall, Mods
from flexc.callspec import spec_of
from flexc.interpret import run
from flexc.ir.build import TRUE, binary, cast, compare, const, input_, load, logic, scalar, size, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import COMPARISONS, INFO, Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.simplify import simplify
from flexc.ir.types import DType
from tests.ir.expressions import BATCH, CAPTURES, HEADS, KV_LEN, Q_LEN, booleans, capture_values, integers

Q, KV, B, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H, Input.SCORE))
DISTANCE = binary(Op.SUB, Q, KV)
OPTIONS = (("block_kv", 32), ("block_q", 32), ("num_stages", 1), ("num_warps", 4), ("precision", "ieee"))
VALUES = capture_values()
TENSORS = tuple(torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in VALUES)

# Row q sees the key 5 * q + 2, modulo the number of keys.
THE_KEY = compare(
    Op.EQ, KV, binary(Op.MOD, binary(Op.ADD, binary(Op.MUL, Q, const(5)), const(2)), const(KV_LEN))
)
ROWS = np.arange(Q_LEN, dtype=np.int32)
KEYS = (5 * ROWS + 2) % KV_LEN


def _inputs(scores: Any) -> dict[Input, Any]:
    return {
        Input.B: np.arange(BATCH, dtype=np.int32).reshape(-1, 1, 1),
        Input.H: np.arange(HEADS, dtype=np.int32).reshape(1, -1, 1),
        Input.Q_IDX: ROWS.reshape(1, 1, -1),
        Input.KV_IDX: KEYS.astype(np.int32).reshape(1, 1, -1),
        Input.SCORE: scores,
    }


def _both(score: Expr, *, mask: Expr = TRUE) -> tuple[Any, Any, Any]:
    """The score of each row's key by the kernel, by `evaluate` in 64 bits, and where it is specified."""
    q, k = torch.randn(BATCH, HEADS, Q_LEN, 16), torch.randn(BATCH, HEADS, KV_LEN, 16)
    call = AttentionCall(
        q=q,
        k=k,
        v=k,
        mods=Mods(simplify(score), simplify(logic(Op.AND, THE_KEY, mask)), CAPTURES),
        values=TENSORS,
        block_map=None,
        scale=0.5,
        sinks=None,
        return_lse=True,
        out=None,
        allow_tf32=False,
        options=OPTIONS,
    )
    _, lse = run(call, spec_of(call))
    assert lse is not None
    raw = 0.5 * (q.double() * k.double()[:, :, KEYS]).sum(-1).numpy()
    env = Env(_inputs(raw), VALUES, np, np.float64)
    specified = evaluate(_specified(score, mask), env)
    seen = evaluate(mask, env)
    expected = np.where(seen, evaluate(score, env), -np.inf)
    shape = (BATCH, HEADS, Q_LEN)
    return lse.numpy(), np.broadcast_to(expected, shape), np.broadcast_to(specified, shape)


def _specified(*roots: Expr) -> Expr:
    """Where the semantics say what the value is: no division by zero, no index out of range."""
    conditions = TRUE
    for node in topological(*roots):
        if node.op in (Op.FLOORDIV, Op.MOD):
            conditions = logic(Op.AND, conditions, compare(Op.NE, node.args[1], const(0)))
        elif node.op is Op.LOAD and isinstance(node.attr, int):
            for dimension, index in enumerate(node.args):
                length = size(node.attr, dimension)
                inside = logic(
                    Op.AND,
                    compare(Op.LE, unary(Op.NEG, length), index),
                    compare(Op.LT, index, length),
                )
                conditions = logic(Op.AND, conditions, inside)
    return conditions


def _assert_equal(score: Expr, *, mask: Expr = TRUE, rtol: float = 1e-5) -> None:
    actual, expected, specified = _both(score, mask=mask)
    known = specified & (np.isfinite(expected) | (expected == -np.inf))
    assert known.any()
    np.testing.assert_allclose(np.where(known, actual, 0), np.where(known, expected, 0), rtol=rtol, atol=1e-5)


def _as_score(x: Expr) -> Expr:
    """An integer's low and middle bits, which a 32-bit float holds exactly."""
    low = binary(Op.BIT_AND, x, const(0xFFF))
    return cast(
        binary(Op.ADD, low, binary(Op.BIT_AND, binary(Op.SHR, x, const(12)), const(0xFFF))), DType.F32
    )


_POSITIVE = binary(Op.ADD, unary(Op.ABS, SCORE), const(0.25))
_OPERANDS = {
    "number": (DISTANCE, binary(Op.ADD, H, const(-1))),
    "integer": (DISTANCE, binary(Op.SUB, binary(Op.MUL, H, const(3)), const(4))),
    "float": (SCORE, _POSITIVE),
    "bool": (compare(Op.LT, KV, Q), compare(Op.LT, H, const(1))),
}
_SPECIAL = {
    Op.SHL: binary(Op.SHL, DISTANCE, H),
    Op.SHR: binary(Op.SHR, DISTANCE, H),
    Op.POW: binary(Op.POW, _POSITIVE, SCORE),
    Op.EQ: compare(Op.EQ, binary(Op.MOD, Q, const(3)), H),
    Op.NE: compare(Op.NE, binary(Op.MOD, Q, const(3)), H),
    Op.WHERE: where(compare(Op.LT, KV, Q), SCORE, const(-3.0)),
    Op.CAST: cast(cast(SCORE, DType.I32), DType.F32),
    Op.CONST: binary(Op.ADD, SCORE, const(-0.75)),
    Op.INPUT: binary(Op.ADD, binary(Op.MUL, B, const(3)), H),
    Op.SCALAR: binary(Op.MUL, binary(Op.ADD, scalar(0, DType.I32), Q), scalar(0, DType.I32)),
    Op.SIZE: binary(Op.SUB, size(1, 0), KV),
    Op.LOAD: load(4, (B, binary(Op.SUB, KV, const(18))), DType.I64),
}  # fmt: skip


def _of(op: Op) -> Expr:
    if op in _SPECIAL:
        return _SPECIAL[op]
    info = INFO[op]
    a, b = _OPERANDS[info.takes]
    if op in (Op.LOG, Op.LOG2, Op.SQRT, Op.RSQRT):
        a = b
    if op in (Op.AND, Op.OR):
        return logic(op, a, b)
    if op in (Op.LT, Op.LE):
        return compare(op, a, b)
    return unary(op, a) if info.arity == 1 else binary(op, a, b)


@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.value)
def test_every_op(op: Op) -> None:
    root = _of(op)
    _assert_equal(_as_score(root) if root.dtype.is_integer else cast(root, DType.F32))


@pytest.mark.parametrize("op", [Op.FLOORDIV, Op.MOD])
@pytest.mark.parametrize(
    "divisor", [const(3), const(-3), const(8), const(-8), binary(Op.SUB, H, const(3)), H]
)
def test_integer_division_rounds_down_for_all_signs(op: Op, divisor: Expr) -> None:
    _assert_equal(_as_score(binary(op, DISTANCE, divisor)))
    _assert_equal(_as_score(binary(op, const(-17), binary(Op.ADD, divisor, const(0)))))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0])
def test_powers_of_negative_numbers(exponent: float) -> None:
    _assert_equal(binary(Op.POW, SCORE, const(exponent)), rtol=3e-5)
    _assert_equal(binary(Op.POW, SCORE, cast(binary(Op.SUB, H, const(1)), DType.F32)), rtol=3e-5)


def test_what_is_not_a_number_stays_so() -> None:
    actual, expected, _ = _both(binary(Op.POW, SCORE, const(0.5)))
    assert np.isnan(expected).any()
    assert np.array_equal(np.isnan(actual), np.isnan(expected))


@pytest.mark.parametrize("factor", [1e-4, 0.013, 0.07, 0.2, 1.0, 20.0])
@pytest.mark.parametrize("op", [Op.TANH, Op.ATAN])
def test_odd_functions_are_accurate_near_zero_and_far_from_it(op: Op, factor: float) -> None:
    x = binary(Op.MUL, cast(DISTANCE, DType.F32), const(factor))
    actual, expected, _ = _both(unary(op, x))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_sign_of_zero_and_of_both_signs() -> None:
    for x in (binary(Op.SUB, H, const(1)), cast(binary(Op.SUB, H, const(1)), DType.F32), SCORE):
        _assert_equal(cast(unary(Op.SIGN, x), DType.F32))


def test_divisions_that_decide_something() -> None:
    for divisor in (7.0, 11.0, 41.0):
        multiple = cast(binary(Op.MUL, Q, const(int(divisor))), DType.F32)
        _assert_equal(unary(Op.FLOOR, binary(Op.DIV, multiple, const(divisor))))


def _interpretable(root: Expr) -> bool:
    """Whether floats are compared within tiles only.

    Compiled code compares scalars as well; to the interpreter they are Python's own, without Triton's types.
    """
    return all(
        level in (Placement.ROW, Placement.COLUMN, Placement.ELEMENT)
        for node, level in place(root).items()
        if node.op in COMPARISONS and node.args[0].dtype.is_float
    )


@given(integers())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_integer_expressions(x: Expr) -> None:
    assume(_interpretable(x))
    actual, expected, specified = _both(_as_score(x))
    assert np.array_equal(np.where(specified, actual, 0).round(), np.where(specified, expected, 0))


@given(booleans())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_masks(mask: Expr) -> None:
    assume(_interpretable(mask))
    actual, expected, specified = _both(const(1.0), mask=mask)
    assert np.array_equal(np.where(specified, actual, 0).round(4), np.where(specified, expected, 0))
