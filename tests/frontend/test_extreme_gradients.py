"""Gradients of largest and smallest elements where several are equal: PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc import attention
from flexc.frontend import factories, indexing, reductions, shapes, torch_choices, torch_ops
from flexc.frontend.dispatch import TracingMode
from flexc.frontend.tracer import Tracer
from flexc.ir import build
from flexc.ir.adjoint import adjoint
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.graph import ModGraph, ModKind, ModSource
from flexc.ir.ops import Input, Op
from flexc.ir.printer import to_text
from flexc.ir.simplify import simplify
from flexc.ir.types import DType
from flexc.ir.verify import verify
from flexc.ir.wire import from_wire, to_wire

# Importing these fills the table of operations.
_OPERATIONS = (factories, indexing, reductions, shapes, torch_choices, torch_ops)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax((0, 1)),
    "amin": lambda x: torch.amin(x, (0, 1)),
    "amax along one": lambda x: (x.amax(-1) * torch.arange(1.0, 1 + x.shape[0])).sum(),
    "amin along one": lambda x: (x.amin(0, keepdim=True) * torch.arange(1.0, 1 + x.shape[1])).sum(),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "max along one": lambda x: (x.max(-1).values * torch.arange(1.0, 1 + x.shape[0])).sum(),
    "min along one": lambda x: (torch.min(x, 0)[0] * torch.arange(1.0, 1 + x.shape[1])).sum(),
    "of largest the smallest": lambda x: x.amax(-1).amin(),
    "of largest the largest": lambda x: x.amax(0).amax(),
    "of largest, the first that is": lambda x: x.amax(0).max(0).values,
    "of functions": lambda x: (x.square() - x).amax(-1).square().sum(),
    "of two": lambda x: torch.maximum(x.amax(), torch.maximum(x[0, 0], x[-1, -1])),
    "with a literal": lambda x: torch.stack([x[0, 0], torch.zeros(()), x[-1, -1]]).amax(),
    "of one element twice": lambda x: torch.stack([x[0, 0], x[0, 0]]).amax(),
    "the spread": lambda x: x.amax() - x.amin() + x.max() * x.min(),
}


def _traced(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[Tracer, Expr]:
    tracer = Tracer()
    with TracingMode(tracer):
        found = tracer.lift(function(tracer.tensor(x)))  # type: ignore[arg-type]
    return tracer, found.value if not found.sizes else found.at(())


def _gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """By the adjoint of the traced function."""
    tracer, root = _traced(function, x)
    done = tracer.program.run(tracer.leaves)
    values = [tracer.leaves[s.leaf] if s.leaf is not None else done[s.step or 0] for s in tracer.slots]
    slot = next(n for n, value in enumerate(values) if value is x)
    env = Env({Input.GRAD: torch.tensor(1.0, dtype=torch.float64)}, values, torch, torch.float64)
    grad = torch.zeros(x.shape, dtype=torch.float64)
    for scatter in adjoint(simplify(root), [slot]).scatters:
        place = tuple(int(evaluate(index, env)) for index in scatter.indices)
        grad[place] += torch.as_tensor(evaluate(scatter.value, env))
    return grad


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_equal_elements(name: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    numbers = data.draw(st.lists(st.integers(-1, 1), min_size=rows * columns, max_size=rows * columns))
    x = torch.tensor(numbers, dtype=torch.float64).view(rows, columns).requires_grad_()
    (expected,) = torch.autograd.grad(FUNCTIONS[name](x), x)
    torch.testing.assert_close(_gradient(FUNCTIONS[name], x.detach()), expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_through_attention(backend: str) -> None:
    q = torch.randn(1, 2, 7, 4, dtype=torch.float64)
    table = torch.tensor([[1.0, 1, 0, 1, 1], [0, 2, 2, 0, 2]], dtype=torch.float64).requires_grad_()
    out = attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[h].amax() * j, backend=backend)
    (actual,) = torch.autograd.grad(out.square().sum(), table)
    scores = q @ q.mT / 2 + table.amax(-1)[:, None, None] * torch.arange(7)
    (expected,) = torch.autograd.grad((scores.softmax(-1) @ q).square().sum(), table)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_many_equal_elements() -> None:
    for n in (3, 5, 7, 200):
        x = torch.full((1, n), 2.0, dtype=torch.float64)
        torch.testing.assert_close(_gradient(lambda x: x.amax(), x), torch.full_like(x, 1 / n))
        (first,) = _gradient(lambda x: x.max(-1).values[0], x)
        assert first.tolist() == [1.0] + [0.0] * (n - 1)


def test_a_step_of_a_reduction_is_another_node() -> None:
    a, b = (build.load(0, (build.const(i),), DType.F32) for i in range(2))
    pair, reduction = build.binary(Op.MAX, a, b), build.extremes(Op.MAX, [a, b])
    assert pair is not reduction
    assert to_text(pair) != to_text(reduction)
    graphs, _, _ = from_wire(to_wire((reduction, None), (), {}))
    assert graphs[0] is reduction


def test_inner_reductions_are_told_from_outer_ones() -> None:
    """Rows of one and of three equal elements: each row has half, as the largest of two that are equal."""
    x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]], dtype=torch.float64)
    torch.testing.assert_close(_gradient(lambda x: x.amax(1).amax(), x), expected)
    torch.testing.assert_close(_gradient(lambda x: x.amax(), x), torch.where(x == 1, 0.25, 0.0).double())


def test_graphs_with_reductions_are_well_formed() -> None:
    x = torch.zeros(2, 3)
    tracer, root = _traced(lambda x: x.amax(), x)
    graph = ModGraph(ModKind.SCORE, root, tuple(tracer.captures), ModSource("mod", "", 0, ""))
    verify(graph)
