"""The values of a kernel's run-time arguments, in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexc.codegen.arguments import Argument, Source
from flexc.frontend.value import Value
from flexc.philox import dropped_of, survivors_weight

if TYPE_CHECKING:
    from flexc.device_map import DeviceMap
    from flexc.ir.blockmap import BlockMap


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a launch, all on its device; `map_offsets` and `map_stretches` are int32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    map_offsets: torch.Tensor | None
    map_stretches: torch.Tensor | None
    seed: torch.Tensor | None = None
    """Of dropout, 0-dim int64."""


def pack(
    arguments: Sequence[Argument],
    tensors: Tensors,
    values: Sequence[Value],
    block_map: BlockMap | DeviceMap | None,
    scale: float,
    dropout_p: float = 0.0,
    *,
    address: Callable[[torch.Tensor], int | torch.Tensor] = torch.Tensor.data_ptr,
) -> list[int | float | torch.Tensor]:
    """One value an argument; counters and TMA descriptors are left to the launcher.

    `address` says how a tensor is passed: as a pointer, or as itself.

    All tensors lie on the device of q, and outlive the launch: only their addresses are kept.
    """
    q, k, v, out = tensors.q, tensors.k, tensors.v, tensors.out
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    heads = q.shape[1]
    shape = (heads, heads // k.shape[1], q.shape[2], k.shape[2], scale)
    packed: list[int | float | torch.Tensor] = [address(q), address(k), address(v), address(out)]
    if tensors.lse is not None:
        packed.append(address(tensors.lse))
    if tensors.sinks is not None:
        packed.append(address(tensors.sinks))
    if values:
        packed += [captured(a, values[a.slot], address) for a in arguments if a.source in CAPTURED]
    if block_map is not None and tensors.map_offsets is not None and tensors.map_stretches is not None:
        blocks = block_map.q_blocks
        packed += [
            address(tensors.map_offsets),
            address(tensors.map_stretches),
            blocks * block_map.heads if block_map.batch > 1 else 0,
            blocks if block_map.heads > 1 else 0,
            block_map.block_q,
            block_map.block_kv,
        ]
    packed += strides
    packed += shape
    if tensors.seed is not None:
        packed += [address(tensors.seed), *dropout_numbers(dropout_p)]
    if any(a.source is Source.BATCH for a in arguments):
        packed.append(q.shape[0])
    return packed


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """Weights with words below the first are dropped, the others are multiplied by the second.

    The upper half of a word is random.
    """
    return dropped_of(dropout_p) << 16, survivors_weight(dropout_p)


def seed_on(seed: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """The seed of dropout as a kernel reads it: 0-dim int64 on its device."""
    if isinstance(seed, torch.Tensor):
        return seed.to(device)
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)


def as_pointed_to(value: Value, device: torch.device) -> Value:
    """A captured value as kernels on `device` read it: a tensor as a new object there, of bytes for booleans.

    A 0-dim tensor may lie on the CPU.
    """
    if not isinstance(value, torch.Tensor):
        return value
    there = value.detach().to(device)
    return there.view(torch.int8) if there.dtype is torch.bool else there


CAPTURED = frozenset({Source.CAPTURE, Source.CAPTURE_STRIDE, Source.CAPTURE_SIZE, Source.SCALAR})


def captured(
    argument: Argument,
    value: Value,
    address: Callable[[torch.Tensor], int | torch.Tensor],
) -> int | float | torch.Tensor:
    """The value of an argument that belongs to a captured `value`."""
    if argument.source is Source.SCALAR:
        # A float beyond fp32 becomes infinite, as it does when PyTorch rounds it.
        return c_float(value).value if isinstance(value, float) else int(value)
    if not isinstance(value, torch.Tensor):
        raise AssertionError(f"{argument.name} is bound to a {type(value).__name__}")
    if argument.source is Source.CAPTURE_STRIDE:
        return value.stride(argument.dimension)
    if argument.source is Source.CAPTURE_SIZE:
        return value.shape[argument.dimension]
    return address(value.view(torch.int8) if value.dtype is torch.bool else value)
