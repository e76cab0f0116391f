"""The product of attention weights and values when values hold NaN or infinity.

A weight of zero times NaN is NaN, so a plain product lets a key that a row does not see spoil the row.
"""

from __future__ import annotations

import torch


def weigh_values(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`weights @ values` in which a row takes part in nothing that it does not see. Differentiable.

    weights (..., rows, n), values (..., n, Dv), visible (..., rows, n) bool. Keys with finite values go
    through one matrix product, the others are added one by one.
    """
    finite = values.isfinite().all(-1, keepdim=True)
    bad = (~finite).flatten(0, -3).any(0).squeeze(-1).nonzero().flatten().tolist()
    result = weights @ values.masked_fill(~finite, 0.0)
    for column in bad:
        seen = visible[..., column, None] & ~finite[..., column, None, :]
        result = result + weights[..., column, None] * torch.where(seen, values[..., column, None, :], 0.0)
    return result


def weigh_mapped_values(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The same without looking at values, for vmap: a row that sees an infinite value becomes NaN there."""
    finite = values.isfinite()
    strange = visible.to(values.dtype) @ (~finite).to(values.dtype)
    return torch.where(strange > 0, torch.nan, weights @ torch.where(finite, values, 0.0))
