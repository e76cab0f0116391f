"""Hypothesis strategies: random mask and score expressions over the inputs and a fixed set of captures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flexc.ir.build import binary, cast, compare, const, input_, load, logic, scalar, size, unary, where
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType, Storage

Q_LEN, KV_LEN, BATCH, HEADS = 23, 19, 2, 3

CAPTURES = (
    Capture("window", Storage.I32),
    Capture("ids", Storage.I32, 1),
    Capture("flags", Storage.BOOL, 2),
    Capture("slopes", Storage.FP32, 1),
    Capture("wide", Storage.I64, 2),
    Capture("rate", Storage.FP32),
)


def capture_values(seed: int = 0) -> list[Any]:
    """Values for `CAPTURES`, of odd lengths, so that indices run out of range and count from the end."""
    rng = np.random.default_rng(seed)
    return [
        int(rng.integers(0, 9)),
        rng.integers(-3, 20, 21).astype(np.int32),
        rng.random((17, 21)) < 0.7,
        rng.normal(size=HEADS).astype(np.float32),
        rng.integers(-5, 40, (BATCH, 18)).astype(np.int64),
        float(np.float32(rng.normal())),
    ]


_INTEGER_INPUTS = [
    input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.Q_IDX, Input.KV_IDX, Input.B, Input.H)
]
_INTEGER_PAIRS = (
    Op.ADD,
    Op.SUB,
    Op.MUL,
    Op.MIN,
    Op.MAX,
    Op.FLOORDIV,
    Op.MOD,
    Op.BIT_AND,
    Op.BIT_OR,
    Op.BIT_XOR,
)
_FLOAT_UNARY = (
    Op.NEG, Op.ABS, Op.SIGN, Op.EXP, Op.EXP2, Op.LOG, Op.LOG2, Op.SQRT, Op.RSQRT, Op.TANH, Op.SIGMOID,
    Op.SIN, Op.COS, Op.ATAN, Op.ERF, Op.FLOOR, Op.DETACH,
)  # fmt: skip
_FLOAT_PAIRS = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MIN, Op.MAX, Op.POW)


def _integer_leaf() -> st.SearchStrategy[Expr]:
    literals = st.sampled_from([-3, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 100, 2**30, 2**31 - 1]).map(const)
    other = st.sampled_from([scalar(0, DType.I32), size(1, 0), size(2, 1)])
    return st.one_of(st.sampled_from(_INTEGER_INPUTS), st.sampled_from(_INTEGER_INPUTS), literals, other)


def _shift(parts: tuple[Op, Expr, int]) -> Expr:
    op, x, count = parts
    return binary(op, x, const(count))


@cache
def integers(depth: int = 3) -> st.SearchStrategy[Expr]:
    """Integer expressions, mostly of 32 bits."""
    if depth == 0:
        return _integer_leaf()
    inner = integers(depth - 1)
    divisor = st.sampled_from([1, 2, 3, 4, 7, 8, -2, 5]).map(const)
    return st.one_of(
        _integer_leaf(),
        st.builds(binary, st.sampled_from((Op.ADD, Op.SUB)), inner, inner),
        st.builds(binary, st.sampled_from(_INTEGER_PAIRS), inner, inner),
        st.builds(binary, st.sampled_from((Op.FLOORDIV, Op.MOD)), inner, divisor),
        st.builds(unary, st.sampled_from((Op.NEG, Op.ABS, Op.SIGN, Op.BIT_NOT)), inner),
        st.tuples(st.sampled_from((Op.SHL, Op.SHR)), inner, st.integers(0, 6)).map(_shift),
        inner.map(lambda i: load(1, (i,), DType.I32)),
        st.tuples(inner, inner).map(lambda ij: load(4, ij, DType.I64)),
        st.builds(where, booleans(depth - 1), inner, inner),
        booleans(depth - 1).map(lambda c: cast(c, DType.I32)),
    )


@cache
def floats(depth: int = 3, *, score: bool = False) -> st.SearchStrategy[Expr]:
    """Float expressions, with the score among their leaves on request."""
    literals = st.sampled_from([0.0, 0.5, 1.0, -2.0, 3.25, 1e-3, 2.0]).map(const)
    leaves = [literals, st.just(scalar(5, DType.F32)), st.just(load(3, (input_(Input.H),), DType.F32))]
    if score:
        leaves.append(st.just(input_(Input.SCORE)))
    if depth == 0:
        return st.one_of(*leaves)
    inner = floats(depth - 1, score=score)
    return st.one_of(
        *leaves,
        integers(depth - 1).map(lambda i: cast(i, DType.F32)),
        st.builds(unary, st.sampled_from(_FLOAT_UNARY), inner),
        st.builds(binary, st.sampled_from(_FLOAT_PAIRS), inner, inner),
        st.builds(where, booleans(depth - 1), inner, inner),
    )


@cache
def booleans(depth: int = 3) -> st.SearchStrategy[Expr]:
    """Boolean expressions: comparisons of integers and floats, flags, logic."""
    operands = integers(max(0, depth - 1))
    comparison = st.builds(compare, st.sampled_from((Op.LT, Op.LE, Op.EQ, Op.NE)), operands, operands)
    if depth == 0:
        return comparison
    inner = booleans(depth - 1)
    of_floats = floats(max(0, depth - 2))
    return st.one_of(
        comparison,
        comparison,
        st.builds(compare, st.sampled_from((Op.LT, Op.LE, Op.EQ, Op.NE)), of_floats, of_floats),
        st.tuples(operands, operands).map(lambda ij: load(2, ij, DType.BOOL)),
        st.builds(logic, st.sampled_from((Op.AND, Op.OR)), inner, inner),
        inner.map(lambda c: unary(Op.NOT, c)),
        st.builds(where, inner, inner, inner),
        st.builds(compare, st.sampled_from((Op.EQ, Op.NE)), inner, inner),
    )


def full_grid(xp: Any = np, lengths: Sequence[int] = (BATCH, HEADS, Q_LEN, KV_LEN)) -> dict[Input, Any]:
    """Int32 inputs that broadcast to [batch, heads, q_len, kv_len]."""
    names = (Input.B, Input.H, Input.Q_IDX, Input.KV_IDX)
    inputs = {}
    for axis, (name, length) in enumerate(zip(names, lengths, strict=True)):
        shape = [1] * 4
        shape[axis] = length
        inputs[name] = xp.arange(length, dtype=xp.int32).reshape(shape)
    return inputs
