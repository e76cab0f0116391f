"""The gradient of sinks, as functions of what a backward's kernels leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_LOG2E = 1 / math.log(2)


def from_parts(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of (B, Hq, tiles) fp32, what each tile of rows adds. Returns (Hq,) of `dtype`."""
    return lambda parts: parts.sum((0, 2)).to(dtype)


def from_delta(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Of delta and shift, (B, Hq, rows) fp32, and the sinks, (Hq,) fp32. Returns (Hq,) of `dtype`.

    A sink is a key without a value: its weight has a gradient of 0 - delta.
    """

    def gradient(delta: torch.Tensor, shift: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        weight = torch.exp2(sinks[None, :, None] * _LOG2E - shift)
        return -(weight * delta).sum((0, 2)).to(dtype)

    return gradient
