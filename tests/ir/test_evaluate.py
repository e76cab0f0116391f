"""What the operations mean, the same on numpy and torch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.errors import InternalError
from flexc.ir.build import binary, cast, const, input_, load, scalar, size, unary
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType
from tests.ir.expressions import booleans, capture_values, floats, full_grid, integers

Q, KV, SCORE = input_(Input.Q_IDX), input_(Input.KV_IDX), input_(Input.SCORE)
LIBRARIES = pytest.mark.parametrize("xp", [np, torch])


def run(root: Expr, values: list[Any], xp: Any, float_dtype: str = "float64", **inputs: Any) -> np.ndarray:
    given_inputs = {Input(name): xp.asarray(value) for name, value in inputs.items()}
    return np.asarray(evaluate(root, Env(given_inputs, values, xp, getattr(xp, float_dtype))))


@LIBRARIES
@pytest.mark.parametrize(
    ("op", "python"),
    [
        (Op.ADD, lambda a, b: a + b),
        (Op.SUB, lambda a, b: a - b),
        (Op.MUL, lambda a, b: a * b),
        (Op.MIN, min),
        (Op.MAX, max),
        (Op.FLOORDIV, lambda a, b: a // b),
        (Op.MOD, lambda a, b: a % b),
        (Op.BIT_AND, lambda a, b: a & b),
        (Op.BIT_OR, lambda a, b: a | b),
        (Op.BIT_XOR, lambda a, b: a ^ b),
        (Op.SHL, lambda a, b: a << abs(b)),
        (Op.SHR, lambda a, b: a >> abs(b)),
    ],
)
def test_integers_are_pythons(op: Op, python: Any, xp: Any) -> None:
    lefts, rights = np.meshgrid(np.arange(-9, 10, dtype=np.int32), np.array([-5, -3, -1, 1, 2, 4], np.int32))
    rights_used = np.abs(rights) if op in (Op.SHL, Op.SHR) else rights
    expected = [python(int(a), int(b)) for a, b in zip(lefts.flat, rights_used.flat, strict=True)]
    varying = run(binary(op, Q, KV), [], xp, q_idx=lefts.reshape(-1), kv_idx=rights_used.reshape(-1))
    assert varying.tolist() == expected
    for b in np.unique(rights_used):
        fixed = run(binary(op, Q, const(int(b))), [], xp, q_idx=np.arange(-9, 10, dtype=np.int32))
        assert fixed.tolist() == [python(a, int(b)) for a in range(-9, 10)]


@LIBRARIES
@pytest.mark.parametrize(
    ("op", "function"),
    [
        (Op.NEG, lambda x: -x), (Op.ABS, abs), (Op.EXP, math.exp), (Op.EXP2, lambda x: 2.0**x),
        (Op.LOG, math.log), (Op.LOG2, math.log2), (Op.SQRT, math.sqrt), (Op.RSQRT, lambda x: x**-0.5),
        (Op.TANH, math.tanh), (Op.SIGMOID, lambda x: 1 / (1 + math.exp(-x))), (Op.SIN, math.sin),
        (Op.COS, math.cos), (Op.ATAN, math.atan), (Op.ERF, math.erf), (Op.FLOOR, math.floor),
        (Op.SIGN, lambda x: 1.0),
    ],
)  # fmt: skip
def test_float_functions(op: Op, function: Any, xp: Any) -> None:
    points = np.array([0.25, 0.5, 1.0, 2.5, 7.75])
    got = run(unary(op, SCORE), [], xp, score=points)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, [function(x) for x in points], rtol=1e-12)


@LIBRARIES
def test_float_pairs_and_infinities(xp: Any) -> None:
    points = np.array([0.5, 2.0, 9.0])
    np.testing.assert_allclose(run(binary(Op.POW, SCORE, const(1.5)), [], xp, score=points), points**1.5)
    np.testing.assert_allclose(run(binary(Op.DIV, SCORE, const(3.0)), [], xp, score=points), points / 3)
    assert run(unary(Op.SIGMOID, SCORE), [], xp, score=np.array([-1e4, 1e4])).tolist() == [0.0, 1.0]
    assert run(unary(Op.TANH, SCORE), [], xp, score=np.array([-1e4, 1e4])).tolist() == [-1.0, 1.0]


@LIBRARIES
def test_nothing_faults_or_warns(xp: Any) -> None:
    least = np.array([-(2**31), 7], np.int32)
    zero = np.zeros(2, np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op in (Op.FLOORDIV, Op.MOD):
            run(binary(op, Q, KV), [], xp, q_idx=least, kv_idx=zero)
            run(binary(op, Q, const(0)), [], xp, q_idx=least)
            assert run(binary(op, Q, const(-1)), [], xp, q_idx=least)[1] == (-7 if op is Op.FLOORDIV else 0)
            run(binary(op, Q, KV), [], xp, q_idx=least, kv_idx=zero - 1)
        run(unary(Op.LOG, SCORE), [], xp, score=np.array([-1.0, 0.0]))
        run(binary(Op.DIV, SCORE, const(0.0)), [], xp, score=np.array([1.0, 0.0]))
        run(cast(SCORE, DType.I32), [], xp, score=np.array([np.nan, np.inf]))
        run(binary(Op.MUL, Q, const(2**31 - 1)), [], xp, q_idx=least)


@LIBRARIES
def test_loads_count_from_the_end_and_are_clamped(xp: Any) -> None:
    table = xp.asarray(np.array([10, 11, 12], np.uint8))
    indices = np.array([-5, -3, -1, 0, 2, 3, 90], np.int32)
    got = run(load(0, (Q,), DType.I32), [table], xp, q_idx=indices)
    assert got.dtype == np.int32
    assert got.tolist() == [10, 10, 12, 10, 12, 12, 12]
    grid = xp.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    got = run(load(0, (Q, KV), DType.F32), [grid], xp, "float32", q_idx=[[0], [1]], kv_idx=[[0, 2]])
    assert got.dtype == np.float32
    assert got.tolist() == [[0, 2], [3, 5]]


@LIBRARIES
def test_empty_and_zero_dimensional_captures(xp: Any) -> None:
    nothing = xp.zeros((0, 4), dtype=xp.float32)
    assert run(load(0, (Q, KV), DType.F32), [nothing], xp, q_idx=[[1], [2]], kv_idx=[[1]]).shape == (2, 1)
    assert run(size(0, 1), [nothing], xp) == 4
    number = xp.asarray(2.5, dtype=xp.float32)
    assert run(load(0, (), DType.F32), [number], xp) == 2.5
    assert run(scalar(0, DType.F32), [0.1], xp) == 0.1
    assert run(scalar(0, DType.I32), [2**31], xp) == -(2**31)


def test_torch_storage_types_and_gradients() -> None:
    indices = np.array([0, 1, -1], np.int32)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64):
        table = torch.tensor([0.5, -2.0, 1.5]).to(dtype)
        assert run(load(0, (Q,), DType.F32), [table], torch, q_idx=indices).tolist() == [0.5, -2.0, 1.5]
    slopes = torch.tensor([1.0, 2.0], requires_grad=True)
    inputs = {Input.Q_IDX: torch.tensor([0, 1, 1, -1])}
    total = evaluate(load(0, (Q,), DType.F32), Env(inputs, [slopes], torch, torch.float32)).sum()
    total.backward()
    assert slopes.grad is not None
    assert slopes.grad.tolist() == [1.0, 3.0]


@LIBRARIES
def test_operands_keep_their_own_size(xp: Any) -> None:
    inputs = full_grid(xp)
    assert evaluate(binary(Op.ADD, Q, const(1)), Env(inputs, [], xp, xp.float32)).shape == (1, 1, 23, 1)


def test_missing_input() -> None:
    with pytest.raises(InternalError, match="kv_idx"):
        run(binary(Op.ADD, Q, KV), [], np, q_idx=1)


@settings(max_examples=150, deadline=None)
@given(root=st.one_of(booleans(3), integers(3), floats(3, score=True)))
def test_numpy_and_torch_agree(root: Expr) -> None:
    values = capture_values(1)
    scores = np.random.default_rng(0).normal(size=(2, 3, 23, 19)).astype(np.float64)
    results = []
    for xp in (np, torch):
        converted = [xp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]
        inputs = full_grid(xp) | {Input.SCORE: xp.asarray(scores)}
        value = np.asarray(evaluate(root, Env(inputs, converted, xp, xp.float64)))
        results.append(np.broadcast_to(value, (2, 3, 23, 19)))
    assert results[0].dtype == results[1].dtype
    if root.dtype is DType.F32:
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-6)
    elif not _reads_floats(root):  # else a comparison may turn on the last place
        np.testing.assert_array_equal(results[0], results[1])


def _reads_floats(root: Expr) -> bool:
    from flexc.ir.expr import topological

    return any(node.dtype is DType.F32 for node in topological(root))
