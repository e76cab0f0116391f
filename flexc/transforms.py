"""Attention under the transforms of torch.func: grad, vjp, vmap.

These want a torch.autograd.Function with a rule for vmap, where plain autograd is content with the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexc.ir.expr import inputs_of
from flexc.ir.ops import Input
from flexc.statement import read

Tensors = tuple[torch.Tensor | None, ...]
_NAMED = 5  # q, k, v, sinks, seed


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The arguments of the operator that are no tensors."""

    n_captures: int
    integers: tuple[int, ...]
    floats: tuple[float, ...]
    scale: float
    text: str

    def inputs(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The operator's arguments; `tensors` are q, k, v, sinks, seed, captured tensors, blocks."""
        captures = list(tensors[_NAMED : _NAMED + self.n_captures])
        blocks = list(tensors[_NAMED + self.n_captures :])
        named = tensors[:_NAMED]
        return (*named, captures, list(self.integers), list(self.floats), blocks, self.scale, self.text)


def attention(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.flexc.attention` with the same arguments, for tensors under a transform."""
    *named, captures, integers, floats, blocks, scale, text = inputs
    numbers = _Numbers(len(captures), tuple(integers), tuple(floats), scale, text)
    results: tuple[torch.Tensor, torch.Tensor]
    results = _Attend.apply(numbers, *named, *captures, *blocks)  # type: ignore[no-untyped-call]
    return results


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(numbers: _Numbers, *tensors: Any) -> Any:
        return torch.ops.flexc.attention(*numbers.inputs(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.numbers, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        # The operator counts its captured tensors from 4: it has no gradient of the seed.
        numbered = [p - (p > _NAMED - 1) for p, need in enumerate(needs) if need]
        grads: list[Any] = [None] * len(tensors)
        if numbered and not (grad_out is None and grad_lse is None):
            found = _Differentiate.apply(  # type: ignore[no-untyped-call]
                ctx.numbers, tuple(numbered), grad_out, grad_lse, out, lse, *tensors
            )
            for place, grad in zip((p for p, need in enumerate(needs) if need), found, strict=True):
                grads[place] = grad
        return None, *grads

    @staticmethod
    def vmap(info: Any, in_dims: Any, numbers: _Numbers, *tensors: Any) -> Any:
        def run(*tensors: Any) -> Any:
            return _Attend.apply(numbers, *tensors)  # type: ignore[no-untyped-call]

        return _vmapped(run, info.batch_size, in_dims[1:], tensors, folds=_folds(numbers), n_batched=3)


class _Differentiate(torch.autograd.Function):
    @staticmethod
    def forward(numbers: _Numbers, wanted: tuple[int, ...], *tensors: Any) -> Any:
        results, inputs = tensors[:4], numbers.inputs(tensors[4:])
        return tuple(torch.ops.flexc.attention_backward(*results, *inputs, list(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from flexc.operators import no_second_order

        no_second_order(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, numbers: _Numbers, wanted: tuple[int, ...], *tensors: Any) -> Any:
        def run(*tensors: Any) -> Any:
            return _Differentiate.apply(numbers, wanted, *tensors)  # type: ignore[no-untyped-call]

        # A folded batch would sum the gradients of what all batches share.
        folds = _folds(numbers) and all(place < 3 for place in wanted)
        return _vmapped(run, info.batch_size, in_dims[2:], tensors, folds=folds, n_batched=4 + 3)


def _folds(numbers: _Numbers) -> bool:
    """Whether more batches are the same computation: nothing tells one batch from another."""
    statement, _ = read(numbers.text)
    roots = [root for root in (statement.score, statement.mask) if root is not None]
    return statement.blocks is None and not any(Input.B in inputs_of(root) for root in roots)


def _vmapped(
    run: Callable[..., Any],
    size: int,
    dims: Sequence[int | None],
    tensors: Sequence[Any],
    *,
    folds: bool,
    n_batched: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """`run` for each of the `size` entries of the mapped tensors; all results have dimension 0 mapped.

    The first `n_batched` tensors have a batch dimension, into which the mapped one is folded where `folds`
    holds and the others are not mapped. Otherwise one call after another.
    """
    if folds and all(dim is None for dim in dims[n_batched:]):
        batched = [
            _folded(x, dim, size) for x, dim in zip(tensors[:n_batched], dims[:n_batched], strict=True)
        ]
        results = run(*batched, *tensors[n_batched:])
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)
    each = [
        run(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return stacked, (0,) * len(stacked)


def _folded(x: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)
