"""Where kernels add up what the gradients of captured tensors are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexc.backward_script import Runnable, Script
from flexc.call import AttentionCall
from flexc.captured_gradient import from_sums
from flexc.codegen.arguments import Source
from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_spec import BackwardSpec
from flexc.codegen.scatter import Sum
from flexc.frontend.value import Value


class CapturedSums:
    """Sums in memory: by slot those of a captured tensor's elements, and those by row or distance before.

    In fp32, or as four words of 64 bits each, where any order has to give the same bits: see `add_exactly` of
    the generated files.
    """

    def __init__(self, call: AttentionCall, script: Script) -> None:
        """None yet."""
        self._call = call
        self._script = script
        self.sums: dict[int, torch.Tensor] = {}
        """By slot."""
        self.places: dict[int, torch.Tensor] = {}
        """By the number of the scatter: (batches, heads, rows or distances)."""

    @property
    def batches(self) -> int:
        """Of the sums by row or distance: 1 where no element depends on the batch."""
        return max(x.shape[0] for x in self.places.values())

    @property
    def distances(self) -> int:
        """How many there are of a query and a key."""
        return max(0, self._call.q.shape[2] + self._call.k.shape[2] - 1)

    def make_for(self, kernel: Runnable, spec: BackwardSpec, values: Sequence[Value]) -> None:
        """Zeros where `kernel` adds up, unless one before has added there. `values` lie on its device."""
        device = self._call.q.device
        for argument in kernel.arguments:
            slot, exact = argument.slot, argument.type == "*i64"
            words, dtype = ((4,), torch.int64) if exact else ((), torch.float32)
            if argument.source is Source.GRAD_CAPTURE and slot not in self.sums:
                value = values[slot]
                assert isinstance(value, torch.Tensor)
                self.sums[slot] = self._zeros((value.numel(), *words) if exact else tuple(value.shape), dtype)
            elif argument.source is Source.PLACED_SUMS and slot not in self.places:
                shape = (*self._shape(spec, slot), *words)
                self.places[slot] = self._script.scratch(shape, dtype, device, zeroed=True)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        device = self._call.q.device
        return self._script.make(lambda _: torch.zeros(shape, dtype=dtype, device=device))

    def _shape(self, spec: BackwardSpec, number: int) -> tuple[int, int, int]:
        scatter = backward_form(spec, scatters=True).scatters[number]
        batch, heads, q_len, _ = self._call.q.shape
        count = q_len if scatter.sum is Sum.ROW else self.distances
        return batch if scatter.by_batch else 1, heads, count

    def gradient(self, slot: int) -> torch.Tensor:
        """That of a captured tensor, once all kernels have run."""
        value = self._call.values[slot]
        assert isinstance(value, torch.Tensor)
        sums = self.sums.get(slot)
        shape, dtype, device = value.shape, value.dtype, value.device
        if sums is None:  # nothing reaches it
            return self._script.make(lambda _: torch.zeros(shape, dtype=dtype, device=device))
        return self._script.then(from_sums(shape, dtype, device), sums)
