"""The kernels of a backward as Triton's interpreter runs them, on the CPU, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from flexc.call import AttentionCall
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import TARGETS
from flexc.interpret import OPTIONS, at_address, entry_of, with_addresses
from flexc.pack_backward import Operands


class Interpreted:
    """One kernel."""

    shares_tiles = False
    processors = 4
    """So that some tests have enough programs, and others have to share out the heads of a group."""

    def __init__(self, generated: GeneratedKernel, entry: Any) -> None:
        self._entry = entry
        self.arguments = generated.arguments
        self.block_q = generated.plan.tiles.block_q
        self.block_kv = generated.plan.tiles.block_kv

    def launch(self, programs: int, operands: Operands) -> None:
        """Run the programs one after another."""
        self._entry[(programs,)](*operands.pack(self.arguments, _as_itself))

    def repeat(
        self, programs: int, values: Sequence[int | float | None]
    ) -> Callable[[tuple[int, ...]], None]:
        """The same again and again: called with the addresses that `values` lacks."""

        def again(addresses: tuple[int, ...]) -> None:
            filled = with_addresses(values, addresses)
            self._entry[(programs,)](*map(at_address, self.arguments, filled))

        return again


def _as_itself(x: torch.Tensor) -> torch.Tensor:
    return x


class Interpreter:
    """Gives kernels for calls on the CPU."""

    target = TARGETS["sm80"]

    def kernel(self, backward: BackwardSpec, entry: Entry, call: AttentionCall) -> Interpreted:
        """One kernel of the backward of a call."""
        return _interpreted(backward, entry, (*OPTIONS, *call.options))


@lru_cache(maxsize=256)
def _interpreted(
    backward: BackwardSpec, entry: Entry, options: tuple[tuple[str, object], ...]
) -> Interpreted:
    generated = lower_backward(backward, entry, Interpreter.target, options=dict(options))
    return Interpreted(generated, entry_of(generated))
