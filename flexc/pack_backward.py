"""The values of the run-time arguments of a backward's kernels, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc.call import AttentionCall
from flexc.codegen.arguments import Argument, Source
from flexc.device_map import DeviceMap
from flexc.device_map_cache import effective_device_map, transposed_on
from flexc.frontend.value import Value
from flexc.ir.blockmap import BlockMap
from flexc.ir.stretches import stretches
from flexc.map_cache import effective_block_map, transposed
from flexc.pack import CAPTURED, captured

_STRIDES_OF = {
    Source.Q_STRIDE: Source.Q,
    Source.K_STRIDE: Source.K,
    Source.V_STRIDE: Source.V,
    Source.OUT_STRIDE: Source.OUT,
    Source.GRAD_OUT_STRIDE: Source.GRAD_OUT,
    Source.GRAD_Q_STRIDE: Source.GRAD_Q,
    Source.GRAD_K_STRIDE: Source.GRAD_K,
    Source.GRAD_V_STRIDE: Source.GRAD_V,
}


@dataclass(frozen=True, slots=True)
class Operands:
    """What a launch passes: tensors and numbers by where they come from, and the captures by slot."""

    tensors: Mapping[Source, torch.Tensor]
    numbers: Mapping[Source, int | float]
    values: Sequence[Value]
    sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Where gradients of captures are added up, by slot."""
    places: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Where what goes to them is added up by row or distance, by the number of the scatter."""

    def pack(
        self,
        arguments: Sequence[Argument],
        address: Callable[[torch.Tensor], Any] = torch.Tensor.data_ptr,
    ) -> list[Any]:
        """One value an argument. `address` says how a tensor is passed: as a pointer, or as itself."""
        return [self._value(argument, address) for argument in arguments]

    def _value(self, argument: Argument, address: Callable[[torch.Tensor], Any]) -> Any:
        source = argument.source
        if source is Source.GRAD_CAPTURE:
            return address(self.sums[argument.slot])
        if source in (Source.PLACED_SUMS, Source.ROW_SUMS):
            return address(self.places[argument.slot])
        if source in CAPTURED:
            return captured(argument, self.values[argument.slot], address)
        if source in self.tensors:
            return address(self.tensors[source])
        if source in _STRIDES_OF:
            return self.tensors[_STRIDES_OF[source]].stride(argument.dimension)
        return self.numbers[source]


_BESIDE = {
    Source.MAP_OFFSETS: Source.ROW_MAP_OFFSETS,
    Source.MAP_STRETCHES: Source.ROW_MAP_STRETCHES,
    Source.MAP_STRIDE_B: Source.ROW_MAP_STRIDE_B,
    Source.MAP_STRIDE_H: Source.ROW_MAP_STRIDE_H,
}


def map_operands(
    call: AttentionCall, block_q: int, block_kv: int, *, by_keys: bool, beside: bool = False
) -> tuple[dict[Source, torch.Tensor], dict[Source, int | float], BlockMap | DeviceMap]:
    """The block map of a call as a kernel walks it, by rows of queries or of keys, on the call's device.

    `beside`: what a kernel that walks the map by rows of keys also reads of it by rows of queries.
    """
    block_map, offsets, walk = _map(call, block_q, block_kv, by_keys=by_keys and not beside)
    blocks = block_map.q_blocks
    tensors = {Source.MAP_OFFSETS: offsets, Source.MAP_STRETCHES: walk}
    numbers: dict[Source, int | float] = {
        Source.MAP_STRIDE_B: blocks * block_map.heads if block_map.batch > 1 else 0,
        Source.MAP_STRIDE_H: blocks if block_map.heads > 1 else 0,
        Source.MAP_BLOCK_Q: block_map.block_q,
        Source.MAP_BLOCK_KV: block_map.block_kv,
    }
    if beside:
        tensors = {_BESIDE[source]: x for source, x in tensors.items()}
        numbers = {_BESIDE[source]: n for source, n in numbers.items() if source in _BESIDE}
    return tensors, numbers, block_map


def _map(
    call: AttentionCall, block_q: int, block_kv: int, *, by_keys: bool
) -> tuple[BlockMap | DeviceMap, torch.Tensor, torch.Tensor]:
    if call.q.is_cuda:
        found = effective_device_map(call, block_q, block_kv)
        if by_keys:
            found = transposed_on(found)
        return found, found.offsets, found.stretches
    block_map = effective_block_map(call, block_q, block_kv)
    assert block_map is not None
    if by_keys:
        block_map = transposed(block_map)
    offsets, walk = (torch.from_numpy(x) for x in stretches(block_map))
    return block_map, offsets, walk
