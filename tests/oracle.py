"""The one tolerance rule of the numeric tests.

A result may be at most twice as far from the fp64 golden as what plain PyTorch computes in the same dtype,
plus one unit in the last place of the largest golden value, plus the golden's own round-off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexc.call import AttentionCall
from flexc.reference import dense
from flexc.resolve import resolve

# Sums of fp64 numbers near 1 in another order; it counts only where the result is fp64 as well.
_GOLDEN_ROUND_OFF = 2.0**-45


@dataclass(frozen=True, slots=True)
class Golden:
    """What a call should give (fp64), and what plain PyTorch gives in the dtype of its inputs."""

    out: torch.Tensor
    lse: torch.Tensor
    plain_out: torch.Tensor
    plain_lse: torch.Tensor

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Fails when `out` (or `lse`) breaks the rule."""
        assert_close_to_golden(out, self.out, self.plain_out)
        if lse is not None:
            assert_close_to_golden(lse, self.lse, self.plain_lse)


def golden(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Golden:
    """The golden of `flexc.attention` with these arguments, on the device of the tensors."""
    mods, values, block_map = resolve(score_mod, mask_mod, block_mask)

    def call(dtype: torch.dtype | None) -> AttentionCall:
        return AttentionCall(
            q=q.detach().to(dtype or q.dtype),
            k=k.detach().to(dtype or q.dtype),
            v=v.detach().to(dtype or q.dtype),
            mods=mods,
            values=values,
            block_map=block_map,
            scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
            sinks=None if sinks is None else sinks.detach(),
            return_lse=True,
            out=None,
            allow_tf32=False,
        )

    with torch.no_grad():
        out, lse = dense(call(torch.float64))
        plain_out, plain_lse = dense(call(None), product=q.dtype)
    return Golden(out, lse, plain_out, plain_lse)


def assert_close_to_golden(actual: torch.Tensor, golden: torch.Tensor, plain: torch.Tensor) -> None:
    """Fails when `actual` is more than twice as far from `golden` as `plain` is, plus round-off."""
    assert actual.shape == golden.shape, f"shape {tuple(actual.shape)}, expected {tuple(golden.shape)}"
    wide = actual.detach().double()
    finite = golden.isfinite()
    wrong = ~torch.where(finite, wide.isfinite(), (wide == golden) | (wide.isnan() & golden.isnan()))
    assert not wrong.any(), f"{int(wrong.sum())} values are not what they should be; first at {_first(wrong)}"
    error = _error(wide, golden, finite)
    largest = float(golden[finite].abs().max()) if finite.any() else 0.0
    allowed = 2 * _error(plain.double(), golden, finite) + torch.finfo(actual.dtype).eps * largest
    allowed += _GOLDEN_ROUND_OFF * max(largest, 1.0)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def _error(x: torch.Tensor, golden: torch.Tensor, finite: torch.Tensor) -> float:
    differences = (x - golden)[finite].abs()
    return float(differences.max()) if differences.numel() else 0.0


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])
