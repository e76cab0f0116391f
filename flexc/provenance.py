"""Which mask a block map was found from: where it says no more than the mask, a closed form replaces it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from flexc.codegen.blocks import choose_blocks
from flexc.frontend.value import Value
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input
from flexc.ir.spec import Blocks
from flexc.ir.substitute import renumber

if TYPE_CHECKING:
    from flexc.call import AttentionCall
    from flexc.device_map import DeviceMap
    from flexc.ir.blockmap import BlockMap

_Key = tuple[weakref.ref[torch.Tensor], int] | Value


@dataclass(frozen=True, slots=True)
class _Origin:
    """A mask's graph, and what it had captured when a map was found from it."""

    mask: Expr
    values: tuple[_Key, ...]


_origins: weakref.WeakKeyDictionary[BlockMap | DeviceMap, _Origin] = weakref.WeakKeyDictionary()


def remember(block_map: BlockMap | DeviceMap, mask: Expr, values: Sequence[Value]) -> None:
    """Note that `block_map` holds all blocks of `mask`, a simplified graph over the captured `values`."""
    if any(isinstance(x, torch.Tensor) and x.is_inference() for x in values):
        return  # its contents may have changed without notice
    keys = tuple((weakref.ref(x), x._version) if isinstance(x, torch.Tensor) else x for x in values)
    _origins[block_map] = _Origin(mask, keys)


def without_own_map(call: AttentionCall) -> AttentionCall:
    """The call without a block map that says what the closed form of its mask says."""
    if call.block_map is None or not is_of_the_mask(call):
        return call
    blocks = choose_blocks(
        call.mask,
        call.values,
        given=False,
        lengths=(call.q.shape[2], call.k.shape[2]),
        wanted=dict(call.options).get("blocks"),
    )
    return replace(call, block_map=None) if blocks is Blocks.RANGES else call


def is_of_the_mask(call: AttentionCall) -> bool:
    """Whether the call's block map was found from the call's mask, for what the mask captures now.

    False where the mask depends on `b` or `h` and the map has one batch or head for all.
    """
    given, mask = call.block_map, call.mask
    origin = None if given is None else _origins.get(given)
    if origin is None or given is None or mask is None:
        return False
    offset = len(call.values) - len(origin.values)
    if offset < 0 or renumber(origin.mask, offset) is not mask:
        return False
    reads = inputs_of(mask)
    if Input.B in reads and given.batch != call.q.shape[0]:
        return False
    if Input.H in reads and given.heads != call.q.shape[1]:
        return False
    return all(map(_is_same, origin.values, call.values[offset:]))


def _is_same(then: _Key, now: Value) -> bool:
    if isinstance(then, tuple):
        reference, version = then
        return isinstance(now, torch.Tensor) and reference() is now and now._version == version
    return not isinstance(now, torch.Tensor) and type(then) is type(now) and then == now
