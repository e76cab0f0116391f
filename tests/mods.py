"""The corpus: every mask and score function that the tests of all layers run.

`entry.make(device, seed)` gives a `Case` with small lengths, few of them multiples of 16, so that the Triton
interpreter and dense references can run it. `entry.make(device, seed, lengths=(q_len, kv_len))` gives other
lengths where `entry.scales` is True.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A mask, a score function or both, with the shapes to run it at."""

    name: str
    mask: Mod | None
    score: Mod | None
    q_len: int
    kv_len: int
    batch: int
    heads: int
    kv_heads: int
    origin: str  # "attn_gym" | "transformers" | "torch" | "flexc"


@dataclass(frozen=True)
class Setting:
    """What a factory builds its tensors with."""

    device: torch.device
    seed: int
    q_len: int
    kv_len: int
    batch: int
    heads: int

    def generator(self) -> torch.Generator:
        """Random numbers of this case."""
        return torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator()).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Random int32 numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator(), dtype=torch.int32).to(self.device)

    def flags(self, probability: float, *shape: int) -> torch.Tensor:
        """Booleans, True with a probability."""
        return (torch.rand(*shape, generator=self.generator()) < probability).to(self.device)

    def documents(self, *, length: int | None = None) -> torch.Tensor:
        """Ascending document numbers of uneven documents, int32 of shape (length,)."""
        length = self.kv_len if length is None else length
        starts = (torch.rand(length, generator=self.generator()) < 3.0 / max(length, 4)).cumsum(0)
        return starts.to(torch.int32).to(self.device)

    def offsets(self) -> torch.Tensor:
        """Where documents start, and the total: int32."""
        cuts = [0, self.kv_len // 5, self.kv_len // 2, self.kv_len // 2 + 3, self.kv_len]
        return torch.tensor(cuts, dtype=torch.int32, device=self.device)


class Factory(Protocol):
    """Makes the mods of a case: a mask, a score function, or a pair of both."""

    def __call__(self, setting: Setting, /) -> Mod | tuple[Mod | None, Mod | None]: ...


@dataclass(frozen=True)
class Entry:
    """One line of the corpus.

    `out_of_range`: it reads captured tensors out of range where the mask is false, which PyTorch refuses on
    the CPU.
    """

    name: str
    origin: str
    kind: str  # "mask" | "score" | "both"
    factory: Factory
    q_len: int
    kv_len: int
    batch: int
    heads: int
    kv_heads: int
    scales: bool
    out_of_range: bool

    def make(
        self, device: torch.device | str = "cpu", seed: int = 0, *, lengths: tuple[int, int] | None = None
    ) -> Case:
        """The case on a device; `lengths` only where `scales`."""
        if lengths is not None and not self.scales:
            raise ValueError(f"{self.name} has fixed lengths ({self.q_len}, {self.kv_len})")
        q_len, kv_len = lengths or (self.q_len, self.kv_len)
        setting = Setting(torch.device(device), seed, q_len, kv_len, self.batch, self.heads)
        made = self.factory(setting)
        if self.kind == "both":
            assert isinstance(made, tuple)
            mask, score = made
        else:
            assert not isinstance(made, tuple)
            mask, score = (made, None) if self.kind == "mask" else (None, made)
        return Case(self.name, mask, score, q_len, kv_len, self.batch, self.heads, self.kv_heads, self.origin)


_ENTRIES: dict[str, Entry] = {}


def register(
    kind: str,
    origin: str = "flexc",
    *,
    q_len: int = 107,
    kv_len: int = 107,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    scales: bool = True,
    out_of_range: bool = False,
) -> Callable[[Factory], Factory]:
    """Adds the decorated factory to the corpus, under its name."""

    def add(factory: Factory) -> Factory:
        name = getattr(factory, "__name__", "").strip("_")
        assert name not in _ENTRIES, name
        _ENTRIES[name] = Entry(
            name, origin, kind, factory, q_len, kv_len, batch, heads, kv_heads, scales, out_of_range
        )
        return factory

    return add


def corpus() -> dict[str, Entry]:
    """Every entry by name."""
    from tests import mods_flexc, mods_foreign, mods_hard

    assert all((mods_flexc, mods_foreign, mods_hard))
    return dict(_ENTRIES)
