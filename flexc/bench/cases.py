"""What is timed: the attention variants that peers have too, and a problem's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc.errors import UnknownOption

Mod = Callable[..., Any]

WINDOW = 1024
SMALL_WINDOW = 128
DOCUMENTS = 12
PREFIX = 4
"""A prefix is this part of the length."""
SOFTCAP = 30.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes of one cell of a benchmark; q, k and v are (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def inputs(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k and v."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (3, self.batch, self.heads, self.length, self.head_dim)
        q, k, v = torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device).to(
            self.dtype
        )
        return q, k, v


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A variant in the words of peers that take no functions. `window` counts the key itself."""

    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Causal or not, and nothing else."""
        return self.window is None and self.softcap is None and self.alibi_slopes is None


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One variant as plain functions, which both flexc and PyTorch's flex_attention take.

    `features` is None when no other peer can express it. `per_batch` and `per_head` say whether the mask
    reads `b` and `h`, which PyTorch's block masks must be told.
    """

    name: str
    mask: Mod | None = None
    score: Mod | None = None
    features: Features | None = field(default=None)
    per_batch: bool = False
    per_head: bool = False


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _none(problem: Problem) -> Case:
    return Case("none", features=Features())


def _causal_case(problem: Problem) -> Case:
    return Case("causal", mask=_causal, features=Features(causal=True))


def _window(width: int) -> Callable[[Problem], Case]:
    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < width)

    features = Features(causal=True, window=width)
    return lambda problem: Case(f"window{width}", mask=window, features=features)


def _prefix(problem: Problem) -> Case:
    end = problem.length // PREFIX

    def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) | (kv_idx < end)

    return Case("prefix", mask=prefix)


def _documents(problem: Problem) -> Case:
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(problem.batch, problem.length, generator=generator).argsort(dim=1)[:, : DOCUMENTS - 1]
    edges = torch.zeros(problem.batch, problem.length, dtype=torch.int32).scatter_(1, starts, 1)
    ids = edges.cumsum(dim=1, dtype=torch.int32).to(problem.device)

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    return Case("documents", mask=documents, per_batch=True)


def _alibi(problem: Problem) -> Case:
    steps = torch.arange(1, problem.heads + 1, dtype=torch.float32, device=problem.device)
    slopes = torch.exp2(-8.0 * steps / problem.heads)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return Case(
        "alibi+causal", mask=_causal, score=alibi, features=Features(causal=True, alibi_slopes=slopes)
    )


def _softcap(problem: Problem) -> Case:
    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    return Case(
        "softcap+causal", mask=_causal, score=softcap, features=Features(causal=True, softcap=SOFTCAP)
    )


CASES: dict[str, Callable[[Problem], Case]] = {
    "none": _none,
    "causal": _causal_case,
    "window": _window(WINDOW),
    "documents": _documents,
    "alibi": _alibi,
    "softcap": _softcap,
    "prefix": _prefix,
    "small-window": _window(SMALL_WINDOW),
}

FIXED_SIZES: dict[str, tuple[int, int, int, int]] = {"small-window": (1, 128, 8192, 64)}
"""Batch, heads, length and head dimension of cases that are timed at one size of their own."""


def make_case(name: str, problem: Problem) -> Case:
    """A standard case with its tensors on the problem's device; raises UnknownOption for another name."""
    maker = CASES.get(name)
    if maker is None:
        raise UnknownOption(f"there is no case {name!r}", hint=f"one of {', '.join(CASES)}")
    return maker(problem)
