"""Where kernels add up what the gradients of captured tensors are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexc.backward_script import Runnable, Script
from flexc.call import AttentionCall
from flexc.captured_gradient import from_sums
from flexc.codegen.arguments import Source
from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_spec import ROWS_PADDED_TO, BackwardSpec
from flexc.codegen.scatter import Sum
from flexc.frontend.value import Value
from flexc.head_gradients import corrected


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
        self.rows: dict[int, torch.Tensor] = {}
        """What `correct_heads` needs, by the number of the scatter: (batches, heads, padded rows)."""
        self._before: dict[int, torch.Tensor] = {}
        self._lost: torch.Tensor | None = None

    @property
    def in_memory(self) -> dict[int, torch.Tensor]:
        """All sums that are not by slot, by the number of the scatter."""
        return {**self.places, **self.rows}

    def start_over(self, lost: torch.Tensor) -> None:
        """Kernels add up again; what they find is taken if `lost` is not 0, or else what is there now."""
        self._before, self._lost = self.sums, lost
        self.sums, self.places = {}, {}

    def correct_heads(self, spec: BackwardSpec, values: Sequence[Value]) -> None:
        """Take out of gradients of heads what the rounding of delta left in them; see `head_gradients`."""
        if not self.rows:
            return
        forms = backward_form(spec, scatters=True).scatters
        batch, heads = self._call.q.shape[:2]
        for slot in dict.fromkeys(forms[n].slot for n in self.rows if n >= 0):
            found = [n for n in self.rows if n >= 0 and forms[n].slot == slot]
            scatters = tuple(forms[n] for n in found)
            run = corrected(scatters, (batch, heads), tuple(values), self._call.q.device)
            read = (self.sums[slot], self.rows[-1], *(self.rows[n] for n in found))
            self.sums[slot] = self._script.then(run, *read)

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
            elif argument.source is Source.ROW_SUMS:
                batch, heads, q_len, _ = self._call.q.shape
                padded = -(-q_len // ROWS_PADDED_TO) * ROWS_PADDED_TO
                self.rows[slot] = self._zeros((batch, heads, padded), torch.float32)
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

        finished = from_sums(shape, dtype, device)
        if self._lost is None:
            return self._script.then(finished, sums)

        def chosen(lost: torch.Tensor, first: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
            return finished(torch.where(lost != 0, again, first))

        return self._script.then(chosen, self._lost, self._before[slot], sums)
