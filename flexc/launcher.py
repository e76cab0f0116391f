"""Launches one compiled kernel: arguments are packed into one block of memory, whose layout is made once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from flexc import driver
from flexc.artifact import Artifact
from flexc.counters import address_of_pair
from flexc.driver import Geometry
from flexc.parameters import Block, Layout
from flexc.repeated import Repeated
from flexc.tensor_maps import TensorMaps, is_descriptor

_recorded: list[Artifact] | None = None


@contextmanager
def recording() -> Iterator[list[Artifact]]:
    """The kernels that are launched meanwhile, by any thread, in order; for reports about them."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


class Launcher:
    """`launch` costs a few microseconds: one pack, one driver call."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._maps = TensorMaps(artifact.arguments) if any(map(is_descriptor, artifact.arguments)) else None
        self._layout = Layout(artifact)
        self._block = Block(self._layout)
        self._geometry = self._new_geometry()
        self._counters = int(artifact.shares_tiles)
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()

    def launch(self, programs: int, device: int, values: Sequence[object]) -> None:
        """Run `programs` programs on the current stream of `device`, which is the current device.

        `values` are those of `flexc.pack`; counters and TMA descriptors are added here.
        """
        stream = torch._C._cuda_getCurrentRawStream(device)
        counters = (address_of_pair(device, stream),) if self._counters else ()
        maps = () if self._maps is None else self._maps.values(values, device)
        with self._lock:
            self._block.fill((*values, *counters, *maps))
            geometry = self._geometry.of(programs, stream)
            self.fire((geometry, self.function(device), self._block.pointers, None), device)

    def repeat(
        self, programs: int, device: int, values: Sequence[int | float | None]
    ) -> Callable[[tuple[int, ...]], None]:
        """`launch` for calls that differ in addresses only: those for which `values` has None, in order."""
        block = Block(self._layout)
        trigger = Trigger(self, self._new_geometry(), block, programs, device)
        return Repeated(self._layout, block, trigger, device, values, self._counters, self._maps)

    def _new_geometry(self) -> Geometry:
        artifact = self._artifact
        return Geometry(32 * artifact.num_warps, artifact.shared, comes_early=artifact.waits)

    def fire(self, arguments: tuple[Any, ...], device: int) -> None:
        """Tell the driver to launch: `arguments` are geometry, function, parameters, and None."""
        if _recorded is not None:
            _recorded.append(self._artifact)
        launch = driver.library().cuLaunchKernelEx
        status = launch(*arguments)
        if status == driver.INVALID_CONTEXT:
            driver.make_current(device)
            status = launch(*arguments)
        if status:
            driver.check(status, f"launching {self._artifact.description}")

    def function(self, device: int) -> ctypes.c_void_p:
        """The kernel on `device`, which is the current device; loaded at the first use."""
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = self._load(device)
        return function

    def _load(self, device: int) -> ctypes.c_void_p:
        driver.make_current(device)
        return driver.load_function(self._artifact.cubin, self._artifact.entry, self._artifact.shared)


class Trigger:
    """Launches what a block holds: all else that the driver is told is ready."""

    def __init__(
        self, launcher: Launcher, geometry: Geometry, block: Block, programs: int, device: int
    ) -> None:
        """Of `geometry` and `block` this is the only user."""
        self._launcher, self._geometry, self._block = launcher, geometry, block
        self._programs, self._device = programs, device
        self._arguments: tuple[Any, ...] = ()

    def aim(self, stream: int) -> None:
        """From now on launch on `stream` of the device, which is the current device."""
        function = self._launcher.function(self._device)
        self._arguments = (self._geometry.of(self._programs, stream), function, self._block.pointers, None)

    def fire(self) -> None:
        """Launch."""
        self._launcher.fire(self._arguments, self._device)
