"""Calls that repeat: everything that a call's shapes and mods decide is decided once and kept.

A repeated call costs the host a lookup, the allocation of its result, and a launch. What may change without
notice is checked each time: what the mods captured, writes to captured tensors, alignment, gradient and
autocast modes. Whatever does not fit goes the long way, which prepares it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flexc.block_mask import as_block_mask
from flexc.call import Result
from flexc.device_map import Map
from flexc.execute import PLAIN, is_watched
from flexc.frontend.value import Value
from flexc.lru import LRU
from flexc.mods import MaskMod, ScoreMod, trace_as
from flexc.prepared import Place, Prepared


class _Group:
    """The calls of one key: those that differ in the tensors that their block maps were found from."""

    def __init__(self, watched: tuple[int, ...]) -> None:
        self.watched = watched
        self._members: LRU[tuple[int, ...], Prepared] = LRU(64)
        self._newest: Prepared | None = None

    def find(self, values: tuple[Value, ...], *, grad: bool) -> tuple[Prepared, Sequence[Any]] | None:
        """The call that serves captured values, and the tensors among them. `grad`: autograd is on."""
        prepared = self._newest
        captured = None if prepared is None else prepared.captures.of(values, grad=grad)
        if captured is None and self.watched:
            prepared = self._members.get(tuple([id(values[slot]) for slot in self.watched]))
            captured = None if prepared is None else prepared.captures.of(values, grad=grad)
        if prepared is None or captured is None:
            return None
        self._newest = prepared
        return prepared, captured

    def add(self, prepared: Prepared) -> None:
        """Let a call be found from now on."""
        identity = prepared.captures.identity
        if identity is not None:
            self._members.put(identity, prepared)
            self._newest = prepared

    def is_lost(self) -> bool:
        """Whether nothing is left, once what no call can repeat is gone."""
        self._members.drop(Prepared.is_lost)
        if self._newest is not None and self._newest.is_lost():
            self._newest = None
        return not len(self._members)


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
    if not _are_keys(scale, sinks, options, dropout_p):
        return None, None
    values: tuple[Value, ...] = ()
    of_score = of_mask = of_blocks = None
    if score_mod is not None:
        score = trace_as(ScoreMod, score_mod)
        values, of_score = score.values, (id(score.graph), score.numbers)
    if mask_mod is not None:
        mask = trace_as(MaskMod, mask_mod)
        of_mask = (id(mask.graph), mask.numbers)
        values = values + mask.values if values else mask.values
    given = None
    if block_mask is not None:
        given, of_blocks, more = _facts_of_blocks(block_mask, mask_mod)
        values = values + more
    grad = torch.is_grad_enabled()
    key = (
        of_score, of_mask, of_blocks,
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device()),
        torch.backends.cuda.matmul.allow_tf32 if q.dtype is torch.float32 else None,
        (
            (deterministic, q.requires_grad, k.requires_grad, v.requires_grad,
             sinks is not None and sinks.requires_grad)
            if grad else None
        ),
        scale, return_lse, dropout_p,
        tuple(sorted(options.items())) if options else None,
        torch.cuda.current_device(), backend,
    )  # fmt: skip
    group = _prepared.get(key)
    if group is not None:
        found = group.find(values, grad=grad)
        if found is not None:
            prepared, captured = found
            result = prepared.run(q, k, v, sinks, captured, given, None, drops=dropout_p > 0)
            if result is not None:
                return result, None
    return None, Place(key, given, len(values))


def _are_keys(scale: object, sinks: object, options: object, dropout_p: object) -> bool:
    """Whether these are of the kinds that there are; what is wrong with others is told elsewhere."""
    if type(dropout_p) is not float and type(dropout_p) is not int:
        return False
    if scale is not None and isinstance(scale, torch.Tensor):
        return False
    if sinks is not None and type(sinks) not in PLAIN:
        return False
    if options is None:
        return True
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
    if second is None:
        return block_mask.block_map, (id(block_mask.block_map), None, block_mask.shape), ()
    of_mask = (id(second.graph), second.numbers)
    return block_mask.block_map, (id(block_mask.block_map), of_mask, block_mask.shape), second.values


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
