"""What is off in gradients of captured tensors that Hopper kernels add up a head, taken out again.

These kernels take delta from the rounded output. Then the gradients of a row's scores do not add up to zero:
each is off by its weight times their sum. So the gradient of what all of a row's scores depend on is off by
that sum times the mean, by the weights, of their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexc.codegen.scatter import ScatterForm
from flexc.ir.evaluate import Env, evaluate_all
from flexc.ir.ops import Input


def corrected(
    scatters: tuple[ScatterForm, ...], heads: tuple[int, int], values: tuple[Any, ...], device: torch.device
) -> Callable[..., torch.Tensor]:
    """A function of sums of one captured tensor, the sums of rows, and those of their weights, one a scatter.

    Args:
        scatters: those of the tensor whose sum is a head's.
        heads: batches and heads.
        values: the captured ones.
        device: of the sums.
    """
    inputs = {
        Input.B: torch.arange(heads[0], device=device).view(-1, 1),
        Input.H: torch.arange(heads[1], device=device),
    }
    places = []
    for scatter in scatters:
        at, inside = evaluate_all((scatter.at, scatter.inside), Env(inputs, values, torch, torch.float32))
        every = torch.zeros(heads, dtype=torch.int64, device=device)
        places.append((every + at, (every == 0) & inside))

    def run(sums: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        flat = sums.reshape(-1)
        for (at, inside), weight in zip(places, weights, strict=True):
            excess = torch.where(inside, (rows * weight).sum(2), 0.0)
            flat = flat.index_add(0, torch.where(inside, at, 0).reshape(-1), excess.reshape(-1), alpha=-1)
        return flat.view(sums.shape)

    return run
