"""Attention for autograd, and for the transforms of torch.func: grad, vjp, vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from flexc import operators
from flexc.errors import NotDifferentiable
from flexc.execute import PLAIN, has_tangents, is_transformed, is_watched
from flexc.mapped import each_gradient, folds, is_batched, vmapped

Tensors = tuple[torch.Tensor | None, ...]
NAMED = 5
"""Tensors of the operator that have names: q, k, v, sinks, seed."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The arguments of the operator that are no tensors."""

    n_captures: int
    integers: tuple[int, ...]
    floats: tuple[float, ...]
    scale: float
    text: str

    def inputs(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The operator's arguments; `tensors` are q, k, v, sinks, seed, captured tensors, blocks."""
        captures = list(tensors[NAMED : NAMED + self.n_captures])
        blocks = list(tensors[NAMED + self.n_captures :])
        named = tensors[:NAMED]
        return (*named, captures, list(self.integers), list(self.floats), blocks, self.scale, self.text)


def attend(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator with these arguments, recorded where a gradient is asked for."""
    *named, captures, integers, floats, blocks, scale, text = inputs
    tensors = (*named, *captures, *blocks)
    results: tuple[torch.Tensor, torch.Tensor]
    if has_tangents(tensors):
        _refuse_tangents()
    if is_transformed() or _wanted(tensors):
        numbers = Numbers(len(captures), tuple(integers), tuple(floats), scale, text)
        function = _Attend if is_transformed() else _Recorded
        results = function.apply(numbers, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = _run(operators.compute, torch.ops.flexc.attention.default, inputs)
    return results


def differentiate(*inputs: Any) -> list[torch.Tensor]:
    """The backward operator with these arguments; its own derivative is an error."""
    *results, q, k, v, sinks, seed, captures, integers, floats, blocks, scale, text, wanted = inputs
    tensors = (*results, q, k, v, sinks, seed, *captures, *blocks)
    if is_transformed() or _wanted(tensors):
        numbers = Numbers(len(captures), tuple(integers), tuple(floats), scale, text)
        return list(_Differentiate.apply(numbers, tuple(wanted), *tensors))  # type: ignore[no-untyped-call]
    found: list[torch.Tensor]
    found = _run(operators.compute_backward, torch.ops.flexc.attention_backward.default, inputs)
    return found


def _wanted(tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _run(directly: Callable[..., Any], operator: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The operator below autograd; PyTorch's dispatcher costs time, and is needed only by who watches."""
    if not is_watched() and all(not isinstance(x, torch.Tensor) or type(x) in PLAIN for x in inputs):
        return directly(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*inputs)


def gradients(numbers: Numbers, results: Tensors, tensors: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """A gradient, or None, for each of `tensors`, which are those of `Numbers.inputs`.

    `results` are the gradients of output and lse, and output and lse. `needs` says what needs a gradient.
    """
    places = [p for p, need in enumerate(needs) if need]
    grads: list[Any] = [None] * len(tensors)
    if places and not (results[0] is None and results[1] is None):
        # The operator counts its captured tensors from 4: it has no gradient of the seed.
        numbered = [p - (p > NAMED - 1) for p in places]
        found = _found(numbers, results, tensors, numbered)
        for place, grad in zip(places, found, strict=True):
            grads[place] = grad
    return grads


def _found(
    numbers: Numbers, results: Tensors, tensors: Sequence[Any], wanted: Sequence[int]
) -> Sequence[torch.Tensor]:
    """The gradients that are wanted; for each of many, if those of the results are batched."""

    def run(*mapped: Any) -> list[torch.Tensor]:
        return operators.attention_backward(*mapped[:4], *numbers.inputs(mapped[4:]), list(wanted))

    def each(rows: Sequence[Any], dims: Sequence[int | None], size: int) -> Sequence[torch.Tensor]:
        rest = (*results[2:], *tensors)
        all_dims = (*dims, *(None for _ in rest))
        return vmapped(run, size, all_dims, (*rows, *rest), **_fold(numbers, wanted))[0]

    if torch.compiler.is_dynamo_compiling():  # compiled autograd traces this: the operator is all it needs
        inputs = numbers.inputs(tensors)
        found: list[torch.Tensor]
        found = torch.ops.flexc.attention_backward.default(*results, *inputs, list(wanted))
        return found
    if any(map(is_batched, results[:2])):
        return each_gradient(each, results[:2])
    return run(*results, *tensors)


def _fold(numbers: Numbers, wanted: Sequence[int]) -> Any:
    """How the backward is mapped: a folded batch would sum the gradients of what all batches share."""
    return {"folds": all(place < 3 for place in wanted) and folds(numbers.text), "n_batched": 4 + 3}


def _refuse_tangents() -> NoReturn:
    raise NotDifferentiable(
        "forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors) of attention were asked for",
        hint='use reverse mode (torch.func.vjp, jacrev), or pass backend="reference" (dense), '
        "which PyTorch differentiates in any mode",
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(numbers: Numbers, *tensors: Any) -> Any:
        return _run(operators.compute, torch.ops.flexc.attention.default, numbers.inputs(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.numbers, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        results = (grad_out, grad_lse, out, lse)
        return None, *gradients(ctx.numbers, results, tensors, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_tangents()

    @staticmethod
    def vmap(info: Any, in_dims: Any, numbers: Numbers, *tensors: Any) -> Any:
        def run(*tensors: Any) -> Any:
            return _Attend.apply(numbers, *tensors)  # type: ignore[no-untyped-call]

        return vmapped(run, info.batch_size, in_dims[1:], tensors, folds=folds(numbers.text), n_batched=3)


class _Recorded(_Attend):
    """The same for plain autograd, which is faster without the parts that transforms need."""

    @staticmethod
    def forward(ctx: Any, numbers: Numbers, *tensors: Any) -> Any:  # type: ignore[override]
        results = _Attend.forward(numbers, *tensors)
        _Attend.setup_context(ctx, (numbers, *tensors), results)
        return results

    setup_context = torch.autograd.Function.setup_context
    vmap = torch.autograd.Function.vmap


class _Differentiate(torch.autograd.Function):
    @staticmethod
    def forward(numbers: Numbers, wanted: tuple[int, ...], *tensors: Any) -> Any:
        inputs = (*tensors[:4], *numbers.inputs(tensors[4:]), list(wanted))
        return tuple(_run(operators.compute_backward, torch.ops.flexc.attention_backward.default, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotDifferentiable(
            "a gradient of a gradient of attention was asked for",
            hint='pass backend="reference" (dense), which PyTorch differentiates any number of times',
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_tangents()

    @staticmethod
    def vmap(info: Any, in_dims: Any, numbers: Numbers, wanted: tuple[int, ...], *tensors: Any) -> Any:
        def run(*tensors: Any) -> Any:
            return _Differentiate.apply(numbers, wanted, *tensors)  # type: ignore[no-untyped-call]

        return vmapped(run, info.batch_size, in_dims[2:], tensors, **_fold(numbers, wanted))
