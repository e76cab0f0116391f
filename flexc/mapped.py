"""The operators over one more dimension: `torch.func.vmap`, and `torch.autograd.grad(is_grads_batched=True)`.

Both hand over tensors that stand for a whole row of them. Where nothing tells one batch from another the new
dimension is folded into the batch, and one call computes all; otherwise one call follows another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _functorch

from flexc.ir.expr import inputs_of
from flexc.ir.ops import Input
from flexc.statement import read

_LEVELS = range(1, 9)
"""Of `is_grads_batched`, one inside of another; PyTorch counts from 1."""


def folds(text: str) -> bool:
    """Whether more batches are the same computation: nothing tells one batch from another.

    Dropout does: which pairs it drops depends on the batch.
    """
    statement, _ = read(text)
    roots = [root for root in (statement.score, statement.mask) if root is not None]
    if statement.dropout_p or statement.blocks is not None:
        return False
    return not any(Input.B in inputs_of(root) for root in roots)


def vmapped(
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
    if size == 0:  # the results of one tell the shapes of those of none
        one = [x if dim is None else _like_entry(x, dim) for x, dim in zip(tensors, dims, strict=True)]
        results = run(*one)
        return tuple(x.new_empty((0, *x.shape)) for x in results), (0,) * len(results)
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


def _like_entry(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros of the shape of one entry of a mapped tensor."""
    dim %= x.dim()
    return x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]))


def _folded(x: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def is_batched(grad: torch.Tensor | None) -> bool:
    """Whether a gradient stands for a row of them: it is one of `is_grads_batched=True`."""
    return grad is not None and _functorch.is_legacy_batchedtensor(grad)


def each_gradient(
    run: Callable[..., Sequence[torch.Tensor]], grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """`run(rows, dims, size)` for gradients that stand for rows of them; so do the results.

    `rows` are the gradients with the mapped dimension, `dims` says where it is, None for one without, and
    `size` is its length. The results have it first.
    """
    level, size = next(_level(grad) for grad in grads if grad is not None and is_batched(grad))
    dims = [0 if is_batched(g) else None for g in grads]
    rows = [_rows(g, level) if is_batched(g) else g for g in grads]
    return [torch._add_batch_dim(x, 0, level) for x in run(rows, dims, size)]


def _rows(grad: torch.Tensor | None, level: int) -> torch.Tensor:
    """All that a gradient stands for; where it is not mapped at `level`, none."""
    assert grad is not None
    return torch._remove_batch_dim(grad, level, 0, 0)


def _level(grad: torch.Tensor) -> tuple[int, int]:
    """At which level a gradient is mapped, and how many it stands for: there are some."""
    found = ((level, _rows(grad, level).shape[0]) for level in _LEVELS)
    return next((level, size) for level, size in found if size)
