"""The gradient of a captured tensor, as a function of what a backward's kernels add up."""

from __future__ import annotations

from collections.abc import Callable

import torch


def from_sums(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of sums in fp32, or exact ones, as words. Returns `shape` of `dtype` on `device`, the tensor's."""

    def gradient(sums: torch.Tensor) -> torch.Tensor:
        exact = sums.dtype is torch.int64
        return (_from_words(sums).view(shape) if exact else sums).to(device=device, dtype=dtype)

    return gradient


def _from_words(words: torch.Tensor) -> torch.Tensor:
    """What `add_exactly` added up: (n, 4) int64 to (n,) fp64, NaN where a term was no number."""
    high, middle, low, strange = words.unbind(1)
    total = high.double() * 2.0**-10 + (middle.double() * 2.0**-50 + low.double() * 2.0**-90)
    return torch.where(strange == 0, total, torch.nan)
