"""The compiled kernels of a backward, as things to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flexc.build_backward import backward_kernel_for
from flexc.call import AttentionCall
from flexc.codegen.arguments import Source
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.gpu_facts import processors, target_of
from flexc.kernel import Kernel
from flexc.pack_backward import Operands
from flexc.tensor_maps import is_descriptor


class Compiled:
    """One kernel on one device."""

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self._kernel = kernel
        self._device = device
        given = (a for a in kernel.artifact.arguments if not is_descriptor(a))
        self.arguments = tuple(a for a in given if a.source is not Source.COUNTER)
        self.shares_tiles = kernel.artifact.shares_tiles
        self.block_q = kernel.artifact.block_q
        self.block_kv = kernel.artifact.block_kv

    @property
    def processors(self) -> int:
        """Streaming multiprocessors of the device."""
        return processors(self._device.index)

    def launch(self, programs: int, operands: Operands) -> None:
        """Run on the current stream of the device."""
        with torch.cuda.device(self._device):
            self._kernel.launcher.launch(programs, self._device.index, operands.pack(self.arguments))

    def repeat(
        self, programs: int, values: Sequence[int | float | None]
    ) -> Callable[[tuple[int, ...]], None]:
        """The same again and again, on the current device: called with the addresses that `values` lacks."""
        return self._kernel.launcher.repeat(programs, self._device.index, values)


class Compiler:
    """Gives the kernels for a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.target = target_of(device.index)

    def kernel(self, backward: BackwardSpec, entry: Entry, call: AttentionCall) -> Compiled:
        """One kernel of the backward of a call."""
        kernel = backward_kernel_for(backward, entry, self.target.name, call.options, call.mods.sources)
        return Compiled(kernel, self._device)
