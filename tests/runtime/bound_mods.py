"""Mods whose numbers and tensors are not in a closure: arguments bound before, attributes of an object."""

from __future__ import annotations

from typing import Any

import torch


def add(bias: torch.Tensor, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The score with a bias of keys, which is bound first."""
    return score + bias[kv_idx]


def add_named(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: torch.Tensor, *, factor: float = 1.0
) -> Any:
    """The same with the bias bound by name, times a factor."""
    return score + factor * bias[kv_idx]


class Biased:
    """A score function with a bias of keys of its own."""

    shift = 0.25

    def __init__(self, bias: torch.Tensor, factor: float = 1.0) -> None:
        self.bias = bias
        self._factor = factor

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self._factor * self.bias[kv_idx] + self.shift

    def twice(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The bias twice, by the object's own call."""
        once = self(score, b, h, q_idx, kv_idx)
        return self(once, b, h, q_idx, kv_idx)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Biased) and self._factor == other._factor

    def __hash__(self) -> int:
        return hash(self._factor)

    @classmethod
    def of_class(cls, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """What the class alone says."""
        return score * cls.shift
