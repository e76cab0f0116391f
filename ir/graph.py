"""What a traced mod is: an expression and the captures it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakValueDictionary

from flexc.errors import Span
from flexc.ir.expr import Expr
from flexc.ir.types import DType, Storage


class ModKind(Enum):
    """A score function maps a score to a score, a mask function says which pairs may attend."""

    SCORE = "score_mod"
    MASK = "mask_mod"


@dataclass(frozen=True, slots=True)
class Capture:
    """The static facts of something that a mod captured; its value is bound at each call.

    `rank` is None for a Python number (passed by value, `storage` I32, I64, FP32 or BOOL), else the number of
    dimensions of a tensor. `name` is the user's: `slopes`, `self.bias`.
    """

    name: str
    storage: Storage
    rank: int | None = None

    @property
    def is_tensor(self) -> bool:
        return self.rank is not None

    @property
    def dtype(self) -> DType:
        return self.storage.dtype


@dataclass(frozen=True, slots=True)
class ModSource:
    """Where a mod was written; for headers and messages, no part of its identity."""

    name: str
    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ModGraph:
    """A traced mod. `root` is f32 for a score_mod, bool for a mask_mod; slots index `captures`."""

    kind: ModKind
    root: Expr
    captures: tuple[Capture, ...]
    source: ModSource
    reads: tuple[Span | None, ...] = field(default=(), compare=False)
    """Where the mod first read each capture, for messages."""

    def shared(self) -> ModGraph:
        """The one object that stands for all graphs equal to this one.

        What is kept by a graph's identity is then kept once for all functions of the same code.
        """
        return _shared.setdefault((self.kind, self.root, self.captures, self.source), self)


_shared: WeakValueDictionary[tuple[object, ...], ModGraph] = WeakValueDictionary()
