"""Launches one compiled kernel: arguments are packed into one block of memory, whose layout is made once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

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
        self._counters = int(artifact.shares_tiles)
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()
        self._firing = Lock()  # blocks of several launches that repeat share the geometry
        self._geometry = Geometry(32 * artifact.num_warps, artifact.shared, comes_early=artifact.waits)

    def launch(self, programs: int, device: int, values: Sequence[object]) -> None:
        """Run `programs` programs on the current stream of `device`, which is the current device.

        `values` are those of `flexc.pack`; counters and TMA descriptors are added here.
        """
        stream = torch._C._cuda_getCurrentRawStream(device)
        counters = (address_of_pair(device, stream),) if self._counters else ()
        maps = () if self._maps is None else self._maps.values(values, device)
        with self._lock:
            self._block.fill((*values, *counters, *maps))
            self._fire(self._block, programs, device, stream)

    def repeat(
        self, programs: int, device: int, values: Sequence[int | float | None]
    ) -> Callable[[tuple[int, ...]], None]:
        """`launch` for calls that differ in addresses only: those for which `values` has None, in order."""
        return Repeated(self._layout, self._fire, programs, device, values, self._counters, self._maps)

    def _fire(self, block: Block, programs: int, device: int, stream: int) -> None:
        if _recorded is not None:
            _recorded.append(self._artifact)
        function = self._functions.get(device)
        if function is None:
            function = self._load(device)
        launch = driver.library().cuLaunchKernelEx
        with self._firing:
            arguments = (self._geometry.of(programs, stream), function, block.pointers, None)
            status = launch(*arguments)
            if status == driver.INVALID_CONTEXT:
                driver.make_current(device)
                status = launch(*arguments)
        if status:
            driver.check(status, f"launching {self._artifact.description}")

    def _load(self, device: int) -> ctypes.c_void_p:
        driver.make_current(device)
        function = driver.load_function(self._artifact.cubin, self._artifact.entry, self._artifact.shared)
        self._functions[device] = function
        return function
