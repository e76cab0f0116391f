"""Ready-made score functions. Each is a plain function of `(score, b, h, q_idx, kv_idx)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexc.check import check_is_tensor
from flexc.mods import ScoreMod, made_again, score_mod

if TYPE_CHECKING:
    import torch

__all__ = ["alibi", "relative_bias", "softcap", "temperature"]


@made_again
def alibi(slopes: torch.Tensor) -> ScoreMod:
    """Linear biases (Press et al., 2022): `score - slopes[h] * (q_idx - kv_idx)`.

    Args:
        slopes: one a query head, floats of shape (Hq,); positive slopes prefer near keys.
    """
    check_is_tensor("slopes", slopes)

    @score_mod
    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


@made_again
def softcap(c: float) -> ScoreMod:
    """Scores held within (-c, c) by tanh, as in Gemma 2: `c * tanh(score / c)`."""
    import torch

    @score_mod
    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return c * torch.tanh(score / c)

    return softcap


@made_again
def relative_bias(table: torch.Tensor) -> ScoreMod:
    """A learned bias by distance: `score + table[h, q_idx - kv_idx + (n - 1) // 2]`.

    Args:
        table: floats of shape (Hq, n), n odd; the middle column is distance 0, columns to the right are keys
            in the
            past. Distances beyond the table take its first or last column.
    """
    check_is_tensor("table", table)
    last = table.shape[-1] - 1
    middle = last // 2

    @score_mod
    def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, (q_idx - kv_idx + middle).clamp(max=last).clamp(min=0)]

    return relative_bias


@made_again
def temperature(t: float | torch.Tensor) -> ScoreMod:
    """Scores divided by `t`: below 1 sharper, above 1 flatter.

    Args:
        t: a number, a tensor or parameter without dimensions, or one a query head, shape (Hq,).
    """
    if isinstance(t, (int, float)) or t.ndim == 0:

        @score_mod
        def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score / t

        return temperature

    @score_mod
    def temperature_by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score / t[h]

    return temperature_by_head
