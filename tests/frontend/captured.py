"""What the tests of captures share: a trace checked against the function itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexc.frontend.trace import Trace, trace
from flexc.ir.graph import ModKind
from flexc.ir.printer import to_text
from tests.frontend.direct import run_directly, run_graph

SHAPE = (2, 3, 11, 13)
BIAS = torch.randn(13)


def check(function: Callable[..., Any], made: Trace | None = None) -> Trace:
    """The trace of a mask, checked against the function itself."""
    made = made or trace(function, ModKind.MASK)
    assert torch.equal(run_graph(made, SHAPE), run_directly(function, SHAPE))
    return made


def window_mask(size: Any) -> Callable[..., Any]:
    """A new closure over `size`."""
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size


def text(made: Trace) -> str:
    """The graph of a trace."""
    return to_text(made.graph.root)


@dataclass
class Config:
    window: int
    shift: torch.Tensor
    names: dict[str, int]


class Model(torch.nn.Module):
    FACTOR = 2

    def __init__(self) -> None:
        super().__init__()
        self.limit: torch.Tensor
        self.config = Config(3, torch.tensor(2), {"first": 2})
        self.register_buffer("limit", torch.tensor([9, 6]))

    @property
    def reach(self) -> int:
        return self.config.window * self.FACTOR

    @staticmethod
    def distance(q_idx, kv_idx):
        return abs(q_idx - kv_idx)

    def mask(self, b, h, q_idx, kv_idx):
        near = self.distance(q_idx, kv_idx) < self.reach + self.config.shift
        return (near & (kv_idx < self.limit[b])) | (kv_idx < self.config.names["first"])
