"""Arithmetic on captured Python numbers: a small program that runs again when one of them changes.

A mod that captures `W` and uses `W // 2` gets one run-time argument for `W // 2`, computed here exactly as
Python
would: no rounding to 32 bits and no work in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Number = bool | int | float
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Leaf:
    """A watched number."""

    leaf: int

    def run(self, leaves: Sequence[Any], done: Sequence[Any]) -> Any:
        return leaves[self.leaf]


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The length of a dimension of a watched tensor."""

    leaf: int
    dimension: int

    def run(self, leaves: Sequence[Any], done: Sequence[Any]) -> Any:
        return leaves[self.leaf].shape[self.dimension]


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that nothing changes. `key` tells 1, True, 1.0 and 0.0, -0.0 apart."""

    key: tuple[str, str]
    value: Any = field(compare=False)

    def run(self, leaves: Sequence[Any], done: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Apply:
    """A Python function of earlier steps."""

    function: Callable[..., Any]
    steps: tuple[int, ...]

    def run(self, leaves: Sequence[Any], done: Sequence[Any]) -> Any:
        return self.function(*[done[step] for step in self.steps])


Step = Leaf | SizeOf | Constant | Apply


class Program:
    """Steps in order; the same step is there once. `names[i]` is how a user would write step i."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.names: list[str] = []
        self._index: dict[Step, int] = {}

    def add(self, step: Step, name: str) -> int:
        """The position of `step`, which is appended if it is new."""
        found = self._index.get(step)
        if found is None:
            found = self._index[step] = len(self.steps)
            self.steps.append(step)
            self.names.append(name if len(name) <= _LONGEST_NAME else f"number{found}")
        return found

    def constant(self, value: Number) -> int:
        """The position of a literal."""
        return self.add(Constant((type(value).__name__, repr(value)), value), repr(value))

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The value of every step. Raises what the user's arithmetic raises."""
        done: list[Any] = []
        for step in self.steps:
            done.append(step.run(leaves, done))
        return done

    @cached_property
    def sized_leaves(self) -> tuple[int, ...]:
        """The leaves of which a length is read. Asked for when no more steps come."""
        return tuple(sorted({step.leaf for step in self.steps if isinstance(step, SizeOf)}))
