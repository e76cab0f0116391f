"""Derivatives of graphs: each rule by name, random scores, conventions at kinks, and what has none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings

from flexc.errors import InternalError
from flexc.ir.adjoint import Adjoint, Scatter, adjoint, obstacle
from flexc.ir.adjoint_rules import ENDS, NO_DERIVATIVE, RULES
from flexc.ir.build import binary, cast, compare, const, detach, input_, load, logic, scalar, unary, where
from flexc.ir.evaluate import Env, evaluate, evaluate_all
from flexc.ir.expr import Expr, rebuild, topological, with_args
from flexc.ir.interval import IntervalEnv, bounds
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.printer import to_text
from flexc.ir.simplify import simplify
from flexc.ir.types import DType
from tests.ir.expressions import capture_values, floats, full_grid

SCORE, GRAD, B, H, Q, KV = (
    input_(i) for i in (Input.SCORE, Input.GRAD, Input.B, Input.H, Input.Q_IDX, Input.KV_IDX)
)
OTHER = load(0, (), DType.F32)


def f64(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def derivatives(root: Expr, score: Any, other: Any = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the score and of the 0-dim tensor in slot 0, for a gradient of 1, an element each."""
    found = adjoint(root, [0])
    inputs = {Input.SCORE: f64(score), Input.GRAD: f64(1.0)}
    env = Env(inputs, [f64(other)], torch, torch.float64)
    shape = torch.broadcast_shapes(f64(score).shape, f64(other).shape)
    total = torch.zeros(shape, dtype=torch.float64)
    for scatter in found.scatters:
        assert scatter.slot == 0
        assert scatter.indices == ()
        total = total + evaluate(scatter.value, env)
    return evaluate(found.score_grad, env).expand(shape), total


def by_autograd(root: Expr, score: Any, other: Any = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by PyTorch's autograd over the evaluated graph."""
    shape = torch.broadcast_shapes(f64(score).shape, f64(other).shape)
    leaves = [f64(x).expand(shape).clone().requires_grad_() for x in (score, other)]
    value = evaluate(root, Env({Input.SCORE: leaves[0]}, [leaves[1]], torch, torch.float64))
    if not value.requires_grad:
        return torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    grads = torch.autograd.grad(value.expand(shape).sum(), leaves, allow_unused=True)
    return tuple(torch.zeros(shape) if g is None else g for g in grads)  # type: ignore[return-value]


def test_every_op_has_a_rule_or_a_reason() -> None:
    assert set(RULES) | set(NO_DERIVATIVE) | ENDS == set(Op)
    assert not set(RULES) & set(NO_DERIVATIVE)
    assert all(NO_DERIVATIVE.values())


POINTS = torch.tensor([-2.5, -1.1, -0.3, 0.4, 0.9, 2.1, 6.9], dtype=torch.float64)
POSITIVE = POINTS.abs() + 0.1
PAIRS = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.MIN, Op.MAX)
UNARY = [op for op in RULES if op not in (*PAIRS, Op.WHERE, Op.DETACH)]
BINARY = [Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.MIN, Op.MAX]


@pytest.mark.parametrize("op", UNARY)
def test_the_rule_of_a_function(op: Op) -> None:
    points = POSITIVE if op in (Op.LOG, Op.LOG2, Op.SQRT, Op.RSQRT) else POINTS
    for root in (unary(op, SCORE), unary(op, binary(Op.MUL, SCORE, const(0.75)))):
        actual, _ = derivatives(root, points)
        torch.testing.assert_close(actual, by_autograd(root, points)[0])
        step = 1e-6
        env = Env({Input.SCORE: torch.stack([points + step, points - step])}, [], torch, torch.float64)
        above, below = evaluate(root, env)
        torch.testing.assert_close(actual, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("op", BINARY)
def test_the_rule_of_a_pair(op: Op) -> None:
    x = (POSITIVE if op is Op.POW else POINTS)[:, None].expand(7, 7)
    y = POINTS.roll(1)[None, :] * 1.01
    for root in (binary(op, SCORE, OTHER), binary(op, binary(Op.MUL, SCORE, SCORE), unary(Op.SIN, OTHER))):
        actual, expected = derivatives(root, x, y), by_autograd(root, x, y)
        for one, two in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, two)
        leaves = (x.clone().requires_grad_(), y.expand(7, 7).clone().requires_grad_())

        def value(score: Any, other: Any, root: Expr = root) -> Any:
            return evaluate(root, Env({Input.SCORE: score}, [other], torch, torch.float64))

        assert torch.autograd.gradcheck(value, leaves)


def test_where_passes_to_what_was_taken() -> None:
    root = where(compare(Op.LT, SCORE, const(0.5)), binary(Op.MUL, SCORE, OTHER), unary(Op.EXP, SCORE))
    for one, two in zip(derivatives(root, POINTS, 3.0), by_autograd(root, POINTS, 3.0), strict=True):
        torch.testing.assert_close(one, two)


def test_what_was_not_taken_gives_no_nan() -> None:
    safe = compare(Op.LT, const(0.0), SCORE)
    zero = const(0.0)
    for function in (Op.SQRT, Op.LOG, Op.RSQRT):
        root = where(safe, binary(Op.MUL, unary(function, SCORE), OTHER), zero)
        points = f64([-1.0, 0.0, 4.0])
        of_score, of_other = derivatives(root, points, 2.0)
        assert (of_score[:2] == 0).all()
        assert (of_other[:2] == 0).all()
        torch.testing.assert_close(of_score[2:], by_autograd(root, points[2:], 2.0)[0])
    shared = where(safe, unary(Op.SQRT, SCORE), where(compare(Op.LT, SCORE, const(-5.0)), SCORE, zero))
    assert derivatives(shared, f64([-9.0, -1.0, 0.0, 4.0]))[0].tolist() == [1.0, 0.0, 0.0, 0.25]
    both = binary(Op.ADD, shared, where(safe, unary(Op.LOG, SCORE), SCORE))
    assert derivatives(both, f64([-9.0, -1.0, 0.0, 4.0]))[0].tolist() == [2.0, 1.0, 1.0, 0.5]


def test_kinks_are_those_of_pytorch() -> None:
    zero = f64([0.0])
    for root, expected in (
        (binary(Op.MAX, SCORE, OTHER), torch.maximum),
        (binary(Op.MIN, SCORE, OTHER), torch.minimum),
        (unary(Op.ABS, SCORE), lambda x, y: x.abs()),
        (binary(Op.MAX, SCORE, const(0.0)), lambda x, y: x.clamp(min=0)),
        (binary(Op.MIN, SCORE, const(0.0)), lambda x, y: x.clamp(max=0)),
        (binary(Op.MIN, SCORE, scalar(1, DType.F32)), lambda x, y: x.clamp(max=0)),
        (binary(Op.POW, OTHER, const(0.0)), lambda x, y: y**0.0),
        (binary(Op.POW, SCORE, OTHER), lambda x, y: x**y),
        (unary(Op.SQRT, SCORE), lambda x, y: x.sqrt()),
        (unary(Op.LOG, SCORE), lambda x, y: x.log()),
        (unary(Op.FLOOR, SCORE), lambda x, y: x.floor()),
        (unary(Op.SIGN, SCORE), lambda x, y: x.sign()),
        (binary(Op.MUL, SCORE, detach(SCORE)), lambda x, y: x * x.detach()),
    ):
        leaves = [zero.clone().requires_grad_(), zero.clone().requires_grad_()]
        wanted = torch.autograd.grad(expected(*leaves).sum(), leaves, allow_unused=True)
        found = adjoint(root, [0])
        env = Env({Input.SCORE: zero, Input.GRAD: f64([1.0])}, [zero, 0.0], torch, torch.float64)
        actual = [evaluate(found.score_grad, env)]
        actual.append(sum((evaluate(s.value, env) for s in found.scatters), torch.zeros(1)))
        for one, two in zip(actual, wanted, strict=True):
            assert torch.equal(one.double().expand(1), torch.zeros(1) if two is None else two) or (
                two is not None and bool(one.isnan() & two.isnan())
            ), to_text(root)


def _clamped(root: Expr) -> Expr:
    """`root` with the larger (smaller) of something and a number as a choice: its gradient is a clamp's."""

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        node = with_args(node, args)
        if node.op not in (Op.MIN, Op.MAX) or not node.dtype.is_float:
            return node
        a, b = args
        if a.op in (Op.CONST, Op.SCALAR):
            a, b = b, a
        if b.op not in (Op.CONST, Op.SCALAR):
            return node
        return where(compare(Op.LE, *((a, b) if node.op is Op.MIN else (b, a))), a, b)

    return rebuild(root, replace)


@settings(max_examples=300, deadline=None)
@given(root=floats(4, score=True))
def test_random_scores_against_autograd(root: Expr) -> None:
    root = simplify(root)
    values = [torch.from_numpy(v) if hasattr(v, "dtype") else v for v in capture_values(3)]
    slopes = values[3].double().requires_grad_()
    values[3] = slopes
    inputs: dict[Input, Any] = full_grid(torch, (1, 3, 5, 4))
    score = torch.randn(1, 3, 5, 4, dtype=torch.float64).requires_grad_()
    weight = torch.randn(1, 3, 5, 4, dtype=torch.float64)
    env = Env({**inputs, Input.SCORE: score}, values, torch, torch.float64)
    value = evaluate(_clamped(root), env)
    wanted = [torch.zeros_like(score), torch.zeros_like(slopes)]
    if value.requires_grad:
        leaves = (score, slopes)
        grads = torch.autograd.grad((value * weight).sum(), leaves, allow_unused=True)
        wanted = [x if g is None else g for x, g in zip(wanted, grads, strict=True)]
    found = adjoint(root, [3])
    with torch.no_grad():
        env = Env({**inputs, Input.SCORE: score, Input.GRAD: weight}, values, torch, torch.float64)
        roots = (found.score_grad, *(s.value for s in found.scatters))
        of_score, *parts = (x.expand(1, 3, 5, 4) for x in evaluate_all(roots, env))
        of_slopes = torch.zeros(3, dtype=torch.float64)
        for scatter, part in zip(found.scatters, parts, strict=True):
            assert scatter.slot == 3
            assert scatter.indices == (H,)
            of_slopes += part.sum((0, 2, 3))
    for actual, expected in zip((of_score, of_slopes), wanted, strict=True):
        fair = expected.isfinite() & (expected.abs() < 1e100)
        torch.testing.assert_close(actual[fair], expected[fair], rtol=1e-6, atol=1e-8)


@settings(max_examples=200, deadline=None)
@given(root=floats(3, score=True))
@example(root=detach(SCORE))
@example(root=unary(Op.EXP, binary(Op.DIV, SCORE, const(0.0))))
def test_random_scores_against_finite_differences(root: Expr) -> None:
    """Where two step widths agree on the slope: no kink or jump is near, and nothing overflows.

    Nor on the way: exp(-inf) is flat, and its derivative by the rules, as by PyTorch, is 0 * inf.
    What is detached has a slope and no gradient.
    """
    root = simplify(root)
    assume(all(node.op is not Op.DETACH for node in topological(root)))
    values = [torch.from_numpy(v) if hasattr(v, "dtype") else v for v in capture_values(5)]
    values[3] = values[3].double()
    inputs: dict[Input, Any] = full_grid(torch, (1, 3, 4, 3))
    score = torch.randn(1, 3, 4, 3, dtype=torch.float64)

    def value(step: float) -> torch.Tensor:
        env = Env({**inputs, Input.SCORE: score + step}, values, torch, torch.float64)
        found: torch.Tensor = evaluate(root, env)
        return found.expand(score.shape)

    slopes = [(value(step) - value(-step)) / (2 * step) for step in (1e-5, 2e-5)]
    env = Env({**inputs, Input.SCORE: score, Input.GRAD: f64(1.0)}, values, torch, torch.float64)
    actual = evaluate(adjoint(root).score_grad, env).expand(score.shape)
    size = 1 + value(0.0).abs()
    smooth = ((slopes[0] - slopes[1]).abs() < 1e-7 * size) & (slopes[0].abs() < 1e4) & (size < 1e4)
    for part in evaluate_all(tuple(topological(root)), env):
        smooth = smooth & torch.as_tensor(part).isfinite()
    torch.testing.assert_close(actual[smooth], slopes[0][smooth], rtol=1e-4, atol=1e-4)


def test_scatters_and_their_axes() -> None:
    bias = load(2, (B, H, Q, binary(Op.SUB, Q, KV)), DType.F32)
    table = load(1, (KV,), DType.F32)
    root = binary(Op.ADD, binary(Op.MUL, SCORE, table), binary(Op.ADD, bias, binary(Op.MUL, table, OTHER)))
    found = {s.slot: s for s in adjoint(root, {0, 1, 2}).scatters}
    assert {slot: s.axes for slot, s in found.items()} == {
        0: frozenset(),
        1: frozenset({Input.KV_IDX}),
        2: frozenset({Input.B, Input.H, Input.Q_IDX, Input.KV_IDX}),
    }
    assert found[2] == Scatter(2, bias.args, GRAD)
    assert place(found[1].value)[found[1].value] is Placement.ELEMENT
    by_score = load(1, (cast(SCORE, DType.I32),), DType.F32)
    (only,) = adjoint(by_score, [1]).scatters
    assert len(only.axes) == 4


def test_only_what_is_wanted() -> None:
    root = binary(Op.ADD, SCORE, binary(Op.MUL, load(1, (H,), DType.F32), OTHER))
    assert adjoint(root) == Adjoint(GRAD, ())
    assert [s.slot for s in adjoint(root, [1]).scatters] == [1]
    assert adjoint(const(0.0), [0]) == Adjoint(const(0.0), ())
    assert adjoint(SCORE).score_grad is GRAD
    with pytest.raises(InternalError, match="a score is f32, not i32"):
        adjoint(Q)


def test_one_read_twice_is_one_scatter_and_other_indices_another() -> None:
    table = load(0, (Q,), DType.F32)
    other = load(0, (KV,), DType.F32)
    root = binary(Op.ADD, binary(Op.MUL, table, table), binary(Op.ADD, SCORE, other))
    found = adjoint(root, [0]).scatters
    assert [s.indices for s in found] == [(Q,), (KV,)]


def test_adjoints_are_small() -> None:
    c = scalar(1, DType.F32)
    softcap = binary(Op.MUL, c, unary(Op.TANH, binary(Op.DIV, SCORE, c)))
    tanh = unary(Op.TANH, binary(Op.DIV, SCORE, c))
    expected = binary(Op.MUL, GRAD, binary(Op.SUB, const(1.0), binary(Op.MUL, tanh, tanh)))
    assert adjoint(softcap).score_grad is expected
    thirty = binary(Op.MUL, const(30.0), unary(Op.TANH, binary(Op.DIV, SCORE, const(30.0))))
    grad = adjoint(simplify(thirty)).score_grad
    assert [n.attr for n in topological(grad) if n.op is Op.CONST] in ([30.0, 1.0], [1.0, 30.0])
    choice = where(compare(Op.LT, Q, KV), binary(Op.MUL, SCORE, const(2.0)), SCORE)
    doubled = binary(Op.MUL, GRAD, const(2.0))
    assert adjoint(choice).score_grad is where(compare(Op.LT, Q, KV), doubled, GRAD)


def test_why_there_is_no_gradient() -> None:
    read = load(0, (H,), DType.F32)
    assert obstacle(binary(Op.ADD, SCORE, read), 0) is None
    assert obstacle(binary(Op.ADD, SCORE, read), 1) == "is not read"
    compared = where(compare(Op.LT, SCORE, read), SCORE, const(0.0))
    assert "only compared" in str(obstacle(compared, 0))
    index = load(1, (cast(read, DType.I32),), DType.F32)
    assert "integer" in str(obstacle(binary(Op.ADD, SCORE, index), 0))
    both = binary(Op.ADD, compared, read)
    assert obstacle(both, 0) is None
    both = logic(Op.AND, compare(Op.LT, read, const(0.0)), compare(Op.LT, SCORE, const(0.0)))
    assert "only compared" in str(obstacle(where(both, SCORE, const(-1.0)), 0))
    assert obstacle(unary(Op.FLOOR, read), 0) is None, "it is 0, as in PyTorch"


def test_nothing_is_known_of_scores_and_gradients() -> None:
    env = IntervalEnv({}, [], lambda slot, indices: indices[0], np)
    for unknown in (SCORE, GRAD, binary(Op.MUL, GRAD, const(2.0))):
        assert bounds(unknown, env) == (-math.inf, math.inf)


def test_the_gradient_is_an_input_of_adjoints_only() -> None:
    assert to_text(adjoint(SCORE).score_grad) == "grad"
    assert GRAD.dtype is DType.F32
    with pytest.raises(InternalError, match="no value for the input grad"):
        evaluate(GRAD, Env({}, [], torch, torch.float64))
    assert math.isclose(float(evaluate(GRAD, Env({Input.GRAD: 2.5}, [], torch, torch.float64))), 2.5)
