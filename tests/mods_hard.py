"""Mods that break other systems: odd captures, odd indices, odd results."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from flexc import masks
from tests.mods import Setting, register


@register("both", q_len=57, kv_len=57, out_of_range=True)
def band_of_a_bias(s: Setting) -> Any:
    """Reads out of range wherever the mask is false."""
    bias = s.randn(s.batch, s.heads, s.q_len, 16)

    def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 16)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[b, h, q_idx, q_idx - kv_idx]

    return band, score


@register("mask")
def even_batches_only(s: Setting) -> Any:
    """Every row of batch entry 1 is empty."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (b % 2 == 0)


@register("mask")
def dense_rows(s: Setting) -> Any:
    rows = s.flags(0.5, s.batch, s.q_len)
    return lambda b, h, q_idx, kv_idx: rows[b, q_idx]


@register("mask", heads=8, kv_heads=2, q_len=45, kv_len=45)
def head_dependent(s: Setting) -> Any:
    return lambda b, h, q_idx, kv_idx: torch.where(
        h % 3 == 0, q_idx >= kv_idx, (q_idx + kv_idx) % (h + 1) == 0
    )


@register("mask", q_len=45, kv_len=45)
def dense_mask(s: Setting) -> Any:
    allowed = s.flags(0.3, s.batch, s.heads, s.q_len, s.kv_len)
    return lambda b, h, q_idx, kv_idx: allowed[b, h, q_idx, kv_idx]


@register("mask")
def nothing_allowed(s: Setting) -> Any:
    return lambda b, h, q_idx, kv_idx: q_idx < 0


@register("mask")
def first_visited_block_is_empty_for_some_rows(s: Setting) -> Any:
    return lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx // 2) & ((q_idx % 3 != 0) | (kv_idx > 70))


@register("mask")
def whole_rows_masked(s: Setting) -> Any:
    return lambda b, h, q_idx, kv_idx: (q_idx % 5 != 2) & (q_idx >= 40) & (q_idx >= kv_idx)


@register("score")
def one_tensor_read_twice(s: Setting) -> Any:
    bias = s.randn(max(s.q_len, s.kv_len))
    return lambda score, b, h, q_idx, kv_idx: score + bias[q_idx] + bias[kv_idx]


@register("score")
def parameter_without_dimensions(s: Setting) -> Any:
    strength = torch.nn.Parameter(torch.tensor(0.3, device=s.device))
    return lambda score, b, h, q_idx, kv_idx: score * strength + strength


@register("score", q_len=45, kv_len=45)
def full_bias(s: Setting) -> Any:
    bias = s.randn(s.batch, s.heads, s.q_len, s.kv_len)
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


@register("score")
def minus_infinity_in_where(s: Setting) -> Any:
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))


@register("score")
def score_does_not_matter(s: Setting) -> Any:
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, 0.0, float("-inf"))


@register("score")
def score_replaced_by_a_number(s: Setting) -> Any:
    return lambda score, b, h, q_idx, kv_idx: torch.zeros_like(score)


@register("score", q_len=43, kv_len=43)
def dot_in_a_score(s: Setting) -> Any:
    a, c = s.randn(s.batch, s.heads, s.q_len, 4), s.randn(s.batch, 2, s.kv_len, 4)
    return lambda score, b, h, q_idx, kv_idx: score + (a[b, h, q_idx] * c[b, h // 2, kv_idx]).sum(-1)


@register("score", q_len=43, kv_len=43)
def torch_dot_in_a_score(s: Setting) -> Any:
    a, c = s.randn(s.batch, s.heads, s.q_len, 4), s.randn(s.batch, 2, s.kv_len, 4)
    return lambda score, b, h, q_idx, kv_idx: score + torch.dot(a[b, h, q_idx], c[b, h // 2, kv_idx])


@register("mask")
def any_of_a_few(s: Setting) -> Any:
    allowed = s.integers(0, 8, s.q_len, 3)
    return lambda b, h, q_idx, kv_idx: (allowed[q_idx] == (kv_idx % 8).unsqueeze(-1)).any(-1)


@register("mask")
def ranges_of_a_row(s: Setting) -> Any:
    low = s.integers(0, 50, s.q_len)
    ranges = torch.stack([low, low + 30], -1)

    def between(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        start, end = ranges[q_idx]
        return (kv_idx >= start) & (kv_idx < end)

    return between


@register("mask")
def negative_indices(s: Setting) -> Any:
    flags = s.flags(0.6, s.kv_len)
    return lambda b, h, q_idx, kv_idx: flags[-1 - kv_idx] & flags[q_idx - 1]


@register("mask")
def negative_division(s: Setting) -> Any:
    return lambda b, h, q_idx, kv_idx: ((kv_idx - q_idx) // 7 + (kv_idx - q_idx) % 7) % 2 == 0


@register("mask")
def bits(s: Setting) -> Any:
    return lambda b, h, q_idx, kv_idx: ((q_idx ^ kv_idx) & (1 << 3)) == 0


@register("mask")
def page_table(s: Setting) -> Any:
    """Logical positions of physical pages, as a paged cache has them."""
    pages = torch.randperm((s.kv_len + 12) // 13, generator=s.generator()).to(s.device)

    def paged(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        logical = pages[kv_idx // 13] * 13 + kv_idx % 13
        return q_idx >= logical

    return paged


@register("mask")
def ellipsis_and_partial_indices(s: Setting) -> Any:
    table = s.flags(0.5, s.batch, s.heads, s.kv_len)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[b][h][kv_idx] | table[..., kv_idx][b, h] | (q_idx == kv_idx)

    return mask


@register("mask")
def sizes_of_captures(s: Setting) -> Any:
    half = torch.empty(s.kv_len // 2, device=s.device)
    return lambda b, h, q_idx, kv_idx: (kv_idx < half.shape[0]) | (q_idx - kv_idx < half.size(0) // 4)


@dataclass
class Window:
    """A callable object with its own numbers."""

    size: int
    offset: torch.Tensor

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.near(q_idx, kv_idx) & (q_idx >= kv_idx)

    def near(self, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < self.size + self.offset


@register("mask")
def callable_object(s: Setting) -> Any:
    return Window(17, torch.tensor(3, device=s.device))


@register("mask")
def bound_method(s: Setting) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window = 21
            self.limit: torch.Tensor
            self.register_buffer("limit", torch.tensor([90, 60], device=s.device))

        def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx - kv_idx < self.window) & (kv_idx < self.limit[b])

    return Model().mask


@register("mask")
def partial_of_a_function(s: Setting) -> Any:
    def window(size: int, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, shift: int) -> Any:
        return (q_idx + shift >= kv_idx) & (q_idx - kv_idx < size)

    return functools.partial(window, 13, shift=2)


@register("mask")
def default_arguments(s: Setting) -> Any:
    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any, size: int = 12) -> Any:
        return abs(q_idx - kv_idx) <= size

    return window


@register("mask")
def branch_on_a_captured_flag(s: Setting) -> Any:
    is_causal, window = True, 0

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = q_idx >= kv_idx if is_causal else q_idx >= 0
        return result & (q_idx - kv_idx < window) if window > 0 else result

    return mask


@register("mask")
def loop_over_captured_windows(s: Setting) -> Any:
    starts = [3, 40, 77]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = q_idx == kv_idx
        for start in starts:
            result |= (kv_idx >= start) & (kv_idx < start + 5)
        return result

    return mask


@register("both")
def random_bits_by_hashing(s: Setting) -> Any:
    """Dropout of scores by an integer hash: 32-bit wrap-around."""

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x = q_idx * 73856093 ^ kv_idx * 19349663
        x = (x ^ (x >> 13)) & 0xFFFF
        return torch.where(x > 6553, score / 0.9, score * 0.0)

    return masks.causal, score


@register("score")
def many_functions(s: Setting) -> Any:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x = torch.sigmoid(score) * torch.cos(score) + torch.sin(score) * torch.erf(score)
        x = x + torch.log1p(score.abs()) - torch.rsqrt(score.square() + 1) + torch.exp2(-score.abs())
        return (
            x + torch.pow(score.abs() + 1e-3, 0.3) + math.pi * torch.sign(score) * torch.clamp(score, -1, 1)
        )

    return score


@register("score")
def half_precision_bias(s: Setting) -> Any:
    bias = s.randn(s.heads, 33).to(torch.bfloat16)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, (q_idx - kv_idx).abs().clamp(max=32)]
