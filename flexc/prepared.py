"""Calls that repeat: everything that a call's shapes and mods decide is decided once and kept.

A repeated call costs the host a lookup, the allocation of its result, and a launch. What may change without
notice is checked each time: what the mods captured, writes to captured tensors, alignment, gradient and
autocast modes. Whatever does not fit goes the long way, which prepares it anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from flexc.block_mask import as_block_mask
from flexc.call import AttentionCall, Result
from flexc.device_map import DeviceMap, Map
from flexc.execute import PLAIN, is_watched, new_seed
from flexc.frontend.value import Value
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Op
from flexc.launch import Launch
from flexc.lru import LRU
from flexc.mods import MaskMod, ScoreMod, trace_as
from flexc.prepared_captures import Captures


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call is kept: what decides it, with objects by their identity."""

    key: tuple[object, ...]
    given: Map | None
    """The user's block map."""
    n_values: int


class Inputs(NamedTuple):
    """The tensors of one call, which passed the checks. `captured` are the captured ones in their order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    seed: torch.Tensor | None
    captured: Sequence[torch.Tensor]


class Step(Protocol):
    """Records a prepared call for autograd."""

    def record(self, prepared: Prepared, inputs: Inputs) -> Result:
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
        dropout_seed: torch.Tensor | None,
        *,
        drops: bool,
    ) -> Result | None:
        """Launch with these tensors; None when something has changed that decides more than addresses.

        With `drops` the call has dropout; without a seed, one is drawn.
        """
        captured: Sequence[torch.Tensor] = ()
        if values:
            found = self.captures.of(values)
            if found is None:
                return None
            captured = found
        if self._given is not None and self._given() is not given:
            return None
        if (self.reads_map or self.captures.needs_copies) and torch.cuda.is_current_stream_capturing():
            return None
        if self.reads_map:
            block_map = given if self._map is None else self._map
            if isinstance(block_map, DeviceMap):
                block_map.ready_here()
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if drops and dropout_seed is None:
            dropout_seed = new_seed(q.device)
        inputs = Inputs(q, k, v, sinks, dropout_seed, captured)
        return self.launch(inputs) if self._step is None else self._step.record(self, inputs)

    def launch(self, inputs: Inputs) -> Result:
        """The launch itself; autograd sees nothing of it."""
        q, k, v, sinks, seed, captured = inputs
        out = q.new_empty(self._out)
        addresses: tuple[int, ...] = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        lse = None
        if self._lse is not None:
            lse = q.new_empty(self._lse, dtype=torch.float32)
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


class _Group:
    """The calls of one key: those that differ in the tensors that their block maps were found from."""

    def __init__(self, watched: tuple[int, ...]) -> None:
        self.watched = watched
        self.members: LRU[tuple[int, ...], Prepared] = LRU(64)
        self._only: Prepared | None = None

    def find(self, values: tuple[Value, ...]) -> Prepared | None:
        if not self.watched:
            return self._only
        return self.members.get(tuple([id(values[slot]) for slot in self.watched]))

    def add(self, prepared: Prepared) -> None:
        identity = prepared.captures.identity
        if identity is not None:
            self.members.put(identity, prepared)
            self._only = prepared

    def is_lost(self) -> bool:
        """Whether nothing is left, once what no call can repeat is gone."""
        self.members.drop(Prepared.is_lost)
        return not len(self.members)


_prepared: LRU[tuple[object, ...], _Group] = LRU(1024)


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
    dropout_p: float,
) -> tuple[Result | None, Place | None]:
    """The result of a call that was prepared before, or None and where to keep it.

    No place: the call is of a kind that is not kept.
    """
    if is_watched() or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None, None
    if torch.is_autocast_enabled() and not _has_dtype_of_autocast(q, k, v):
        return None, None
    if (sinks is not None and type(sinks) not in PLAIN) or type(dropout_p) not in (float, int):
        return None, None
    if isinstance(scale, torch.Tensor) or (options is not None and not _can_be_keys(options)):
        return None, None
    score = None if score_mod is None else trace_as(ScoreMod, score_mod)
    mask = None if mask_mod is None else trace_as(MaskMod, mask_mod)
    values: tuple[Value, ...] = () if score is None else score.values
    if mask is not None:
        values = values + mask.values if values else mask.values
    given, of_blocks = None, None
    if block_mask is not None:
        given, of_blocks, more = _facts_of_blocks(block_mask, mask_mod)
        values = values + more
    key = (
        None if score is None else id(score.graph),
        None if mask is None else id(mask.graph),
        of_blocks,
        *_facts_of(q, k, v, sinks),
        scale, return_lse, dropout_p, _numbers(values),
        deterministic if torch.is_grad_enabled() else None,
        tuple(sorted(options.items())) if options else None,
        torch.cuda.current_device(), backend,
    )  # fmt: skip
    group = _prepared.get(key)
    found = None if group is None else group.find(values)
    if found is not None:
        result = found.run(q, k, v, sinks, values, given, None, drops=dropout_p > 0)
        if result is not None:
            return result, None
    return None, Place(key, given, len(values))


def _can_be_keys(options: object) -> bool:
    """Whether these are options of the kinds that there are; what is wrong with others is told elsewhere."""
    if not isinstance(options, Mapping):
        return False
    return all(isinstance(k, str) and isinstance(v, int | float | str | None) for k, v in options.items())


def _facts_of_blocks(
    block_mask: Any, mask_mod: Callable[..., Any] | None
) -> tuple[Map | None, tuple[object, ...], tuple[Value, ...]]:
    """The map of a block mask, what of the mask is a part of the key, and what its own mask captured."""
    block_mask = as_block_mask(block_mask)
    own = block_mask.mask_mod
    second = None if own is None or own is mask_mod else trace_as(MaskMod, own)
    graph, values = (None, ()) if second is None else (id(second.graph), second.values)
    return block_mask.block_map, (id(block_mask.block_map), graph, block_mask.shape), values


def _facts_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[object, ...]:
    """What of the tensors decides a launch: layouts, and who needs a gradient."""
    needs = None
    if torch.is_grad_enabled():
        needs = q.requires_grad, k.requires_grad, v.requires_grad, sinks is not None and sinks.requires_grad
    return (
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device()),
        torch.backends.cuda.matmul.allow_tf32 if q.dtype is torch.float32 else None,
        needs,
    )  # fmt: skip


def _numbers(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple([x for x in values if not isinstance(x, torch.Tensor)]) if values else values


def _has_dtype_of_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    dtype = torch.get_autocast_dtype("cuda")
    return q.dtype is dtype and k.dtype is dtype and v.dtype is dtype


def keep(place: Place, prepared: Prepared) -> None:
    """Let `replay` find a call. What depends on tensors or maps that are no more is forgotten."""
    _prepared.drop(_Group.is_lost)
    group = _prepared.get(place.key)
    if group is None or group.watched != prepared.captures.watched:
        group = _Group(prepared.captures.watched)
        _prepared.put(place.key, group)
    group.add(prepared)
