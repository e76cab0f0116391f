"""Simplification keeps meaning, shrinks, and stops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.build import FALSE, TRUE, binary, cast, compare, const, input_, logic, scalar, unary, where
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.simplify import simplify
from flexc.ir.types import DType
from tests.ir.expressions import booleans, capture_values, floats, full_grid, integers

Q, KV, B, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H, Input.SCORE))
CAUSAL = compare(Op.LE, KV, Q)
SAME = compare(Op.EQ, B, H)
FLOAT_LESS = compare(Op.LT, SCORE, const(0.0))


def add(a: Expr, b: Any) -> Expr:
    return binary(Op.ADD, a, b if isinstance(b, Expr) else const(b))


def sub(a: Any, b: Any) -> Expr:
    return binary(Op.SUB, *(x if isinstance(x, Expr) else const(x) for x in (a, b)))


def both(a: Expr, b: Expr) -> Expr:
    return logic(Op.AND, a, b)


def either(a: Expr, b: Expr) -> Expr:
    return logic(Op.OR, a, b)


def neither(a: Expr) -> Expr:
    return unary(Op.NOT, a)


def divides_by_zero(root: Expr) -> bool:
    """Whether a result may be unspecified, so that a rule may change it."""
    return any(n.op in (Op.FLOORDIV, Op.MOD) and n.args[1].op is not Op.CONST for n in topological(root))


@settings(max_examples=500, deadline=None)
@given(root=st.one_of(booleans(4), integers(4), floats(3, score=True)))
def test_meaning_is_kept(root: Expr) -> None:
    simple = simplify(root)
    assert simple.dtype is root.dtype
    assert simplify(simple) is simple
    if divides_by_zero(root):
        return
    values = capture_values(2)
    scores = np.random.default_rng(0).normal(size=(2, 3, 23, 19)).astype(np.float32)
    env = Env(full_grid() | {Input.SCORE: scores}, values, np, np.float64)
    before, after = (np.broadcast_to(evaluate(x, env), (2, 3, 23, 19)) for x in (root, simple))
    if root.dtype is DType.F32:
        np.testing.assert_allclose(after, before, rtol=1e-6)
    else:
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (add(Q, 0), Q),
        (add(const(0), Q), Q),
        (add(SCORE, 0.0), SCORE),
        (sub(Q, Q), const(0)),
        (sub(SCORE, SCORE), sub(SCORE, SCORE)),
        (sub(0, Q), unary(Op.NEG, Q)),
        (sub(add(Q, 3), 5), sub(Q, 2)),
        (sub(add(Q, KV), KV), Q),
        (add(sub(Q, KV), KV), Q),
        (add(Q, unary(Op.NEG, KV)), sub(Q, KV)),
        (unary(Op.NEG, sub(Q, KV)), sub(KV, Q)),
        (binary(Op.MUL, const(1), Q), Q),
        (binary(Op.MUL, Q, const(0)), const(0)),
        (binary(Op.MUL, SCORE, const(0.0)), binary(Op.MUL, SCORE, const(0.0))),
        (binary(Op.MUL, binary(Op.MUL, Q, const(3)), const(5)), binary(Op.MUL, Q, const(15))),
        (binary(Op.MUL, const(6), const(7)), const(42)),
        (binary(Op.MUL, const(2**30), const(4)), const(0)),
        (binary(Op.FLOORDIV, Q, const(1)), Q),
        (binary(Op.FLOORDIV, binary(Op.FLOORDIV, Q, const(4)), const(8)), binary(Op.FLOORDIV, Q, const(32))),
        (binary(Op.FLOORDIV, const(7), const(0)), binary(Op.FLOORDIV, const(7), const(0))),
        (binary(Op.MOD, Q, const(1)), const(0)),
        (binary(Op.MOD, binary(Op.MOD, Q, const(8)), const(8)), binary(Op.MOD, Q, const(8))),
        (
            sub(Q, binary(Op.MUL, binary(Op.FLOORDIV, Q, const(8)), const(8))),
            binary(Op.MOD, Q, const(8)),
        ),
        (binary(Op.DIV, SCORE, const(8.0)), binary(Op.MUL, SCORE, const(0.125))),
        (binary(Op.DIV, SCORE, const(3.0)), binary(Op.DIV, SCORE, const(3.0))),
        (binary(Op.POW, SCORE, const(2.0)), binary(Op.MUL, SCORE, SCORE)),
        (binary(Op.MIN, Q, Q), Q),
        (binary(Op.MIN, binary(Op.MIN, Q, const(9)), const(4)), binary(Op.MIN, Q, const(4))),
        (binary(Op.MAX, Q, binary(Op.MIN, Q, KV)), Q),
        (binary(Op.MAX, SCORE, const(-math.inf)), SCORE),
        (unary(Op.ABS, unary(Op.NEG, Q)), unary(Op.ABS, Q)),
        (binary(Op.BIT_AND, Q, const(0)), const(0)),
        (binary(Op.BIT_XOR, Q, Q), const(0)),
        (binary(Op.SHL, Q, const(0)), Q),
        (cast(cast(Q, DType.I64), DType.I32), Q),
        (cast(cast(CAUSAL, DType.I32), DType.F32), cast(CAUSAL, DType.F32)),
        (cast(cast(SCORE, DType.I32), DType.F32), cast(cast(SCORE, DType.I32), DType.F32)),
        (compare(Op.LE, Q, Q), TRUE),
        (compare(Op.LE, SCORE, SCORE), compare(Op.LE, SCORE, SCORE)),
        (compare(Op.LT, SCORE, SCORE), FALSE),
        (compare(Op.NE, Q, Q), FALSE),
        (compare(Op.NE, cast(CAUSAL, DType.I32), const(0)), CAUSAL),
        (compare(Op.EQ, CAUSAL, FALSE), compare(Op.LT, Q, KV)),
        (both(CAUSAL, TRUE), CAUSAL),
        (both(CAUSAL, FALSE), FALSE),
        (either(FALSE, CAUSAL), CAUSAL),
        (both(CAUSAL, CAUSAL), CAUSAL),
        (both(both(CAUSAL, SAME), CAUSAL), both(CAUSAL, SAME)),
        (both(CAUSAL, compare(Op.LT, Q, KV)), FALSE),
        (either(SAME, neither(SAME)), TRUE),
        (both(CAUSAL, either(SAME, CAUSAL)), CAUSAL),
        (neither(neither(FLOAT_LESS)), FLOAT_LESS),
        (neither(CAUSAL), compare(Op.LT, Q, KV)),
        (neither(FLOAT_LESS), neither(FLOAT_LESS)),
        (neither(both(CAUSAL, SAME)), either(compare(Op.LT, Q, KV), compare(Op.NE, B, H))),
        (neither(both(CAUSAL, FLOAT_LESS)), neither(both(CAUSAL, FLOAT_LESS))),
        (where(TRUE, Q, KV), Q),
        (where(CAUSAL, Q, Q), Q),
        (where(neither(FLOAT_LESS), Q, KV), where(FLOAT_LESS, KV, Q)),
        (where(CAUSAL, where(CAUSAL, Q, KV), B), where(CAUSAL, Q, B)),
        (where(CAUSAL, where(SAME, Q, KV), KV), where(both(CAUSAL, SAME), Q, KV)),
        (where(CAUSAL, SAME, FALSE), both(CAUSAL, SAME)),
        (where(CAUSAL, TRUE, SAME), either(CAUSAL, SAME)),
        (where(FLOAT_LESS, FALSE, SAME), both(neither(FLOAT_LESS), SAME)),
        (where(CAUSAL, const(1), const(0)), cast(CAUSAL, DType.I32)),
        (where(const(True), add(binary(Op.MUL, Q, const(1)), 0), KV), Q),
    ],
)  # fmt: skip
def test_rule(root: Expr, expected: Expr) -> None:
    assert simplify(root) is expected


def test_folding_does_not_skip_what_32_bits_do() -> None:
    overflow = binary(Op.MUL, const(1e30), const(1e30))
    assert simplify(overflow) is overflow
    assert simplify(binary(Op.ADD, const(0.5), const(0.25))) is const(0.75)
    assert simplify(binary(Op.ADD, const(2**31 - 1), const(1))) is const(-(2**31))
    unspecified = cast(binary(Op.DIV, const(1.0), const(0.0)), DType.I32)
    assert simplify(unspecified).op is Op.CAST


def test_a_long_chain_is_quick_and_not_recursive() -> None:
    chain = CAUSAL
    for i in range(3000):
        chain = both(chain, compare(Op.NE, Q, add(KV, scalar(i % 50, DType.I32))))
    assert len(topological(simplify(chain))) < 250


def test_what_becomes_a_float_is_what_32_bits_hold_of_it() -> None:
    near, nearer = (
        cast(binary(Op.SUB, const(n, DType.I32), const(2**30, DType.I32)), DType.F32) for n in (-1, -3)
    )
    assert simplify(near).attr == -(2.0**30)
    assert simplify(compare(Op.LE, near, nearer)).attr is True
