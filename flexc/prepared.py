"""A call that was prepared: one launch with all but its addresses filled in."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from flexc.call import AttentionCall, Result
from flexc.device_map import DeviceMap, Map
from flexc.execute import new_seed
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Op
from flexc.launch import Launch
from flexc.prepared_captures import Captures


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call is kept: what decides it, with objects by their identity."""

    key: tuple[object, ...]
    given: Map | None
    """The user's block map."""
    n_values: int


class Step(Protocol):
    """Records a prepared call for autograd."""

    def record(
        self,
        prepared: Prepared,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
        captured: Sequence[torch.Tensor],
    ) -> Result:
        """The result, which knows its backward."""
        ...


class Prepared:
    """One launch with all but its addresses filled in.

    A block map was found from what captured tensors held; a kernel without one reads them anew each time. A
    CUDA graph has maps of its own, which its replays find anew. The map that a user gave is held weakly. With
    a `step`, the results need gradients.
    """

    def __init__(self, call: AttentionCall, launch: Launch, given: Map | None, step: Step | None) -> None:
        q, block_map = call.q, launch.block_map
        self._launch = launch.kernel.launcher.repeat(launch.programs, q.device.index, launch.repeated)
        self._step = step
        self._out = (*q.shape[:3], call.v.shape[3])
        self._lse = tuple(q.shape[:3]) if call.return_lse else None
        self._fp32 = torch.empty(0, dtype=torch.float32, device=q.device)
        watches = block_map is not None or given is not None
        self.captures = Captures(
            call.values,
            q.device,
            read=launch.captured,
            watched=_reads_of(call.mask) if watches else (),
            records=step is not None,
        )
        self._given = None if given is None else weakref.ref(given)
        self._map = block_map if isinstance(block_map, DeviceMap) and block_map is not given else None
        self.reads_map = block_map is not None
        self._waits = self.reads_map or self.captures.needs_copies
        # What the key names by identity, and what the arguments are addresses of.
        self._held = (call.mods, launch.uploads)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        captured: Sequence[torch.Tensor],
        given: Map | None,
        seed: torch.Tensor | None,
        *,
        drops: bool,
    ) -> Result | None:
        """Launch with these tensors; None when something has changed that decides more than addresses.

        `captured`: those that `captures` found to be of its kind. `given`: the user's block map. With `drops`
        the call has dropout; without a seed, one is drawn.
        """
        if self._given is not None and self._given() is not given:
            return None
        if self._waits:
            if torch.cuda.is_current_stream_capturing():
                return None
            if self.reads_map:
                block_map = given if self._map is None else self._map
                if isinstance(block_map, DeviceMap):
                    block_map.ready_here()
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if drops and seed is None:
            seed = new_seed(q.device)
        if self._step is not None:
            return self._step.record(self, q, k, v, sinks, seed, captured)
        return self.launch(q, k, v, sinks, seed, captured)

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
        captured: Sequence[torch.Tensor],
    ) -> Result:
        """The launch itself; autograd sees nothing of it."""
        out = q.new_empty(*self._out)
        addresses: tuple[int, ...] = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        lse = None
        if self._lse is not None:
            lse = self._fp32.new_empty(*self._lse)  # naming a dtype costs as much as an allocation
            addresses += (lse.data_ptr(),)
        if sinks is not None:
            sinks = as_kernels_read_sinks(sinks)
            addresses += (sinks.data_ptr(),)
        if captured:
            captured = self.captures.there(captured)
            addresses += self.captures.addresses(captured)
        if seed is not None:
            addresses += (seed.data_ptr(),)
        self._launch(addresses)
        return out, lse

    def is_lost(self) -> bool:
        """Whether no call can repeat this one, since something that it depends on is no more."""
        return (self._given is not None and self._given() is None) or self.captures.identity is None


def as_kernels_read_sinks(sinks: torch.Tensor) -> torch.Tensor:
    """The sinks in fp32 and contiguous: themselves, or a copy."""
    if sinks.dtype is torch.float32 and sinks.is_contiguous():
        return sinks
    return sinks.detach().float().contiguous()


@lru_cache(maxsize=256)
def _reads_of(mask: Expr | None) -> frozenset[int]:
    """The slots of the captured tensors that a mask reads."""
    if mask is None:
        return frozenset()
    return frozenset(n.attr for n in topological(mask) if n.op is Op.LOAD and isinstance(n.attr, int))


def can_keep(call: AttentionCall, place: Place) -> bool:
    """Whether what a call depends on can be watched."""
    return (
        call.out is None
        and len(call.values) == place.n_values  # else blocks were made a part of the mask
        and not torch.cuda.is_current_stream_capturing()
        and not any(x.is_inference() for x in call.values if isinstance(x, torch.Tensor))
    )
