"""Calls that repeat: everything that a call's shapes and mods decide is decided once and kept.

A repeated call costs the host a lookup, the allocation of its result, and a launch. What may change without
notice is checked each time: what the mods captured, writes to captured tensors, alignment, gradient and
autocast modes. Whatever does not fit goes the long way, which prepares it anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexc.block_mask import as_block_mask
from flexc.call import AttentionCall, Result
from flexc.device_map import DeviceMap, Map
from flexc.execute import PLAIN, is_watched
from flexc.frontend.value import Value
from flexc.launch import Launch
from flexc.lru import LRU
from flexc.mods import as_mask_mod, as_score_mod


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
        captured: list[torch.Tensor],
    ) -> Result:
        """The result, which knows its backward. `captured` are the captured tensors in their order."""
        ...


class Prepared:
    """One launch with all but its addresses filled in. Captured tensors are held weakly.

    A block map was found from what they held; a kernel without one reads them anew each time. A CUDA graph
    has maps of its own, which its replays find anew. The map that a user gave is held weakly, too. With a
    `step`, the results need gradients.
    """

    def __init__(self, call: AttentionCall, launch: Launch, given: Map | None, step: Step | None) -> None:
        q, block_map = call.q, launch.block_map
        self._launch = launch.kernel.launcher.repeat(launch.programs, q.device.index, launch.repeated)
        self._step = step
        self._out = (*q.shape[:3], call.v.shape[3])
        self._lse = tuple(q.shape[:3]) if call.return_lse else None
        watches = block_map is not None or given is not None
        tensors = [(slot, x) for slot, x in enumerate(call.values) if isinstance(x, torch.Tensor)]
        self._slots = [slot for slot, _ in tensors]
        self._needs = [step is not None and x.requires_grad for _, x in tensors]
        self._captured = [
            (weakref.ref(x), x.data_ptr(), x.shape, x._version if watches else None) for _, x in tensors
        ]
        self._numbers = [(slot, x) for slot, x in enumerate(call.values) if not isinstance(x, torch.Tensor)]
        self._given = None if given is None else weakref.ref(given)
        self._map = block_map if isinstance(block_map, DeviceMap) and block_map is not given else None
        self.reads_map = block_map is not None
        # What the key names by identity, and what the arguments are addresses of.
        self._held = (call.mods, launch.uploads)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        values: tuple[Value, ...],
        given: Map | None,
    ) -> Result | None:
        """Launch with these tensors; None when something has changed that decides more than addresses."""
        if values and not self._same(values):
            return None
        if self._given is not None and self._given() is not given:
            return None
        if self.reads_map:
            if torch.cuda.is_current_stream_capturing():
                return None
            block_map = given if self._map is None else self._map
            if isinstance(block_map, DeviceMap):
                block_map.ready_here()
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if self._step is None:
            return self.launch(q, k, v, sinks)
        captured = [values[slot] for slot in self._slots] if values else []
        return self._step.record(self, q, k, v, sinks, captured)  # type: ignore[arg-type]  # tensors, by slot

    def launch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Result:
        """The launch itself, of tensors that passed the checks; autograd sees nothing of it."""
        out = q.new_empty(self._out)
        addresses: tuple[int, ...] = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        lse = None
        if self._lse is not None:
            lse = q.new_empty(self._lse, dtype=torch.float32)
            addresses += (lse.data_ptr(),)
        if sinks is not None:
            addresses += (sinks.data_ptr(),)
        self._launch(addresses)
        return out, lse

    def _same(self, values: tuple[Value, ...]) -> bool:
        for slot, number in self._numbers:
            if values[slot] != number or type(values[slot]) is not type(number):
                return False
        if not self.holds(values[slot] for slot in self._slots):
            return False
        if torch.is_grad_enabled():
            for slot, needs in zip(self._slots, self._needs, strict=True):
                if values[slot].requires_grad is not needs:  # type: ignore[union-attr]  # a tensor
                    return False
        return True

    def is_lost(self) -> bool:
        """Whether no call can repeat this one, since something that it depends on is no more."""
        if self._given is not None and self._given() is None:
            return True
        return any(reference() is None for reference, *_ in self._captured)

    def holds(self, captured: Iterable[object]) -> bool:
        """Whether these are the captured tensors that the launch was prepared for, and unchanged."""
        for x, (reference, address, shape, version) in zip(captured, self._captured, strict=True):
            if (
                reference() is not x
                or not isinstance(x, torch.Tensor)
                or (version is not None and x._version != version)
                or x.data_ptr() != address
                or x.shape != shape
            ):
                return False
        return True


def can_keep(call: AttentionCall, place: Place) -> bool:
    """Whether what a call depends on can be watched."""
    return (
        call.out is None
        and len(call.values) == place.n_values  # else blocks were made a part of the mask
        and not torch.cuda.is_current_stream_capturing()
        and all(
            x.device == call.q.device and not x.is_inference()
            for x in call.values
            if isinstance(x, torch.Tensor)
        )
    )


_prepared: LRU[tuple[object, ...], Prepared] = LRU(1024)


def replay(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    deterministic: bool,
    options: Mapping[str, object] | None,
    backend: str,
) -> tuple[Result | None, Place | None]:
    """The result of a call that was prepared before, or None and where to keep it.

    No place: the call is of a kind that is not kept.
    """
    if is_watched() or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None, None
    if torch.is_autocast_enabled() and not _has_dtype_of_autocast(q, k, v):
        return None, None
    needs: tuple[bool, ...] | None = None
    if torch.is_grad_enabled():
        needs = (
            q.requires_grad, k.requires_grad, v.requires_grad, sinks is not None and sinks.requires_grad,
            deterministic,
        )  # fmt: skip
    if sinks is not None and (
        type(sinks) not in PLAIN or sinks.dtype is not torch.float32 or not sinks.is_contiguous()
    ):
        return None, None
    score = None if score_mod is None else as_score_mod(score_mod).trace()
    mask = None if mask_mod is None else as_mask_mod(mask_mod).trace()
    values: tuple[Value, ...] = () if score is None else score.values
    if mask is not None:
        values = values + mask.values if values else mask.values
    given, of_blocks = None, None
    if block_mask is not None:
        block_mask = as_block_mask(block_mask)
        given = block_mask.block_map
        second = block_mask.mask_mod
        second = None if second is None or second is mask_mod else as_mask_mod(second).trace()
        values = values if second is None else values + second.values
        of_blocks = (id(given), None if second is None else id(second.graph), block_mask.shape)
    key = (
        None if score is None else id(score.graph),
        None if mask is None else id(mask.graph),
        of_blocks,
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        scale, return_lse, needs,
        None if sinks is None else (sinks.shape, sinks.get_device()),
        torch.backends.cuda.matmul.allow_tf32 if q.dtype is torch.float32 else None,
        tuple(sorted(options.items())) if options else None,
        torch.cuda.current_device(), backend,
    )  # fmt: skip
    found = _prepared.get(key)
    if found is not None:
        result = found.run(q, k, v, sinks, values, given)
        if result is not None:
            return result, None
    return None, Place(key, given, len(values))


def _has_dtype_of_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    dtype = torch.get_autocast_dtype("cuda")
    return q.dtype is dtype and k.dtype is dtype and v.dtype is dtype


def keep(place: Place, prepared: Prepared) -> None:
    """Let `replay` find a call. What depends on tensors or maps that are no more is forgotten."""
    _prepared.drop(Prepared.is_lost)
    _prepared.put(place.key, prepared)
