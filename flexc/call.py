"""A checked attention call, as every backend receives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexc.errors import Span
from flexc.frontend.value import Value
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture, ModGraph, ModSource

if TYPE_CHECKING:
    from flexc.device_map import DeviceMap
    from flexc.ir.blockmap import BlockMap

Result = tuple[torch.Tensor, torch.Tensor | None]
"""The output (B, Hq, L, Dv), and the lse (B, Hq, L) where it was asked for."""


@dataclass(frozen=True, slots=True)
class Mods:
    """The mods of a call as one pair of graphs over one list of captures.

    `score` is None for plain scores, `mask` is None where every pair may attend. `where(c, s, -inf)` inside a
    score_mod has been made part of `mask`.
    """

    score: Expr | None
    mask: Expr | None
    captures: tuple[Capture, ...]
    sources: tuple[ModSource, ...] = ()
    graphs: tuple[ModGraph, ...] = ()
    """What was traced; held so that their identities stay theirs."""

    def read_at(self, slot: int) -> Span | None:
        """Where a mod first read the capture in `slot`, if that is known."""
        reads = [span for graph in self.graphs for span in graph.reads]
        return reads[slot] if slot < len(reads) else None


PLAIN = Mods(None, None, ())


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Tensors that passed the checks, and what to compute with them.

    q (B, Hq, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), on one device. `values` are the captured tensors and
    numbers by slot of `mods.captures`. `block_map` is what the user gave, or None. `sinks` (Hq,).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mods: Mods
    values: tuple[Value, ...]
    block_map: BlockMap | DeviceMap | None
    scale: float
    sinks: torch.Tensor | None
    return_lse: bool
    out: torch.Tensor | None
    allow_tf32: bool
    options: tuple[tuple[str, object], ...] = ()
    dropout_p: float = 0.0
    """Of the probabilities, in the forward and its backward."""
    dropout_seed: int | torch.Tensor = 0
    """64 bits: which pairs are dropped; the same on every backend. A tensor is 0-dim int64, on the device."""
    deterministic: bool = False
    """The backward gives the same bits every time."""

    @property
    def score(self) -> Expr | None:
        return self.mods.score

    @property
    def mask(self) -> Expr | None:
        return self.mods.mask

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self.mods.captures


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a backend's backward returns, each in the dtype and shape of what it is the gradient of.

    `values` has one entry a captured value; None where no gradient was asked for, or none exists.
    """

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sinks: torch.Tensor | None
    values: tuple[torch.Tensor | None, ...]
