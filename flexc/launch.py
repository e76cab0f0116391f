"""One launch of a kernel on tensors: the result tensors, the block map on the device, the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexc.call import Result
from flexc.codegen.arguments import Source
from flexc.codegen.hopper_walk import parts_of_head
from flexc.frontend.value import Value
from flexc.gpu_facts import processors
from flexc.pack import Tensors, as_pointed_to, pack, seed_on

if TYPE_CHECKING:
    from flexc.artifact import Artifact
    from flexc.device_map import DeviceMap
    from flexc.ir.blockmap import BlockMap
    from flexc.kernel import Kernel


MOVING = frozenset(
    {Source.Q, Source.K, Source.V, Source.OUT, Source.LSE, Source.SINKS, Source.CAPTURE, Source.DROPOUT_SEED}
)
"""Addresses that are others each time, in this order; those of captured tensors in that of the arguments."""


class Launch:
    """Everything of a launch but the launch itself. Tensors have passed the checks."""

    def __init__(
        self,
        kernel: Kernel,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        values: tuple[Value, ...],
        block_map: BlockMap | DeviceMap | None,
        scale: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        dropout_p: float = 0.0,
        dropout_seed: torch.Tensor | int = 0,
    ) -> None:
        batch, heads, q_len, _ = q.shape
        device = q.device
        if out is None:
            out = torch.empty((batch, heads, q_len, v.shape[3]), dtype=q.dtype, device=device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device) if kernel.returns_lse else None
        self.kernel = kernel
        self.device = device
        self.block_map = block_map
        apart = heads if kernel.artifact.packed_heads == 1 else k.shape[1]
        self.programs = programs_of(kernel.artifact, q_len, apart * batch, device)
        self.uploads = (None, None) if block_map is None else on_device(block_map, device)
        self.tensors = Tensors(
            q,
            k,
            v,
            out,
            lse,
            None if sinks is None else sinks.float().contiguous(),
            self.uploads[0],
            self.uploads[1],
            seed=seed_on(dropout_seed, device) if dropout_p else None,
        )
        # The copies are held: the arguments have only their addresses.
        self.values = tuple(as_pointed_to(x, device) for x in values)
        self.arguments = pack(
            kernel.artifact.arguments, self.tensors, self.values, block_map, scale, dropout_p
        )

    @property
    def captured(self) -> tuple[int, ...]:
        """The slots of the captured tensors whose addresses a kernel takes, in its order."""
        return tuple(a.slot for a in self.kernel.artifact.arguments if a.source is Source.CAPTURE)

    @property
    def repeated(self) -> list[int | float | None]:
        """The arguments of a launch that is made again, without the addresses that are others then."""
        named = self.kernel.artifact.arguments  # those that the launcher adds come last
        return [
            None if a.source in MOVING else x  # type: ignore[misc]  # numbers
            for a, x in zip(named, self.arguments, strict=False)
        ]

    def run(self) -> Result:
        """Launch on the current stream of the tensors' device."""
        if self.programs:
            with torch.cuda.device(self.device):
                self.kernel.launcher.launch(self.programs, self.device.index, self.arguments)
        return self.tensors.out, self.tensors.lse


def programs_of(artifact: Artifact, q_len: int, heads: int, device: torch.device) -> int:
    """How many programs compute so many rows of so many heads, of all batches."""
    tiles = -(-q_len // artifact.block_q)
    if artifact.shares_heads and tiles * heads:
        return heads * parts_of_head(tiles, heads, artifact.beside * processors(device.index))
    return min(tiles * heads, processors(device.index)) if artifact.shares_tiles else tiles * heads


def on_device(block_map: BlockMap | DeviceMap, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and stretches of a map on `device`, copied there once."""
    from flexc.device_map_cache import map_on

    there = map_on(block_map, device)
    return there.offsets, there.stretches
