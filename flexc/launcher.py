"""Launches one compiled kernel: arguments are packed into one block of memory, whose layout is made once."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch

from flexc import driver
from flexc.artifact import Artifact
from flexc.codegen.arguments import Argument
from flexc.counters import address_of_pair
from flexc.tensor_maps import SIZE, TensorMaps, block_of, is_descriptor

_FORMAT = {"i32": "i", "i64": "q", "fp32": "f"}
_MAP = f"{SIZE}s"
_MAP_ALIGNMENT = 64
_PLACES = 256
"""Of which the descriptors of a repeated launch are kept, 512 bytes each."""
# Parameters that a kernel has and does not read: they take room, and no value.
_UNUSED = {"i": "4x", "q": "8x", "P": "8x"}

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
        formats = [item for a in artifact.arguments for item in _formats(a)]
        # Pointers of Triton's own, which this kernel does not use.
        formats += [_UNUSED["P"]] * (artifact.parameters - len(formats))
        layout, offsets, end = [], [], 0
        for item in formats:
            start = -(-end // _alignment(item)) * _alignment(item)
            layout.append(f"{start - end}x{item}")
            offsets.append(start)
            end = start + struct.calcsize(f"={item}")
        self._struct = struct.Struct("=" + "".join(layout))
        self._block = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        self._start = -ctypes.addressof(self._block) % _MAP_ALIGNMENT
        base = ctypes.addressof(self._block) + self._start
        self._pointers = (ctypes.c_void_p * len(formats))(*(base + offset for offset in offsets))
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()
        self._threads = 32 * artifact.num_warps

    def launch(self, programs: int, device: int, values: Sequence[object]) -> None:
        """Run `programs` programs on the current stream of `device`, which is the current device.

        `values` are those of `flexc.pack`; counters and TMA descriptors are added here.
        """
        stream = torch._C._cuda_getCurrentRawStream(device)
        if self._maps is not None:
            values = (*values, *self._counters(device, stream), *self._maps.values(values, device))
        self._send(programs, device, stream, values)

    def repeat(
        self, programs: int, device: int, tail: tuple[object, ...]
    ) -> Callable[[tuple[int, ...]], None]:
        """`launch` for calls that differ in their first arguments only, which are addresses.

        Where tensors lie that are used again and again is soon known, and so are their descriptors.
        """
        maps = self._maps
        if maps is None:

            def plain(addresses: tuple[int, ...]) -> None:
                stream = torch._C._cuda_getCurrentRawStream(device)
                self._send(programs, device, stream, addresses + tail)

            return plain
        known: dict[tuple[int, ...], tuple[bytes, ...]] = {}

        def described(addresses: tuple[int, ...]) -> None:
            stream = torch._C._cuda_getCurrentRawStream(device)
            values = addresses + tail
            found = known.get(addresses)
            if found is None:
                if len(known) >= _PLACES:
                    known.clear()
                found = known[addresses] = maps.values(values, device)
            self._send(programs, device, stream, (*values, *self._counters(device, stream), *found))

        return described

    def _counters(self, device: int, stream: int) -> tuple[int, ...]:
        return (address_of_pair(device, stream),) if self._artifact.shares_tiles else ()

    def _send(self, programs: int, device: int, stream: int, values: Sequence[object]) -> None:
        if _recorded is not None:
            _recorded.append(self._artifact)
        function = self._functions.get(device)
        if function is None:
            function = self._load(device)
        launch = driver.library().cuLaunchKernel
        arguments = (
            function, programs, 1, 1, self._threads, 1, 1, self._artifact.shared,
            ctypes.c_void_p(stream), self._pointers, None,
        )  # fmt: skip
        with self._lock:
            self._struct.pack_into(self._block, self._start, *values)
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


def _formats(argument: Argument) -> list[str]:
    """How the parameters of an argument are packed. A descriptor is followed by its lengths and strides."""
    if is_descriptor(argument):
        rank = len(block_of(argument)[1])
        return [_MAP, *[_UNUSED["i"]] * rank, *[_UNUSED["q"]] * rank]
    return ["Q" if argument.type.startswith("*") else _FORMAT[argument.type]]


def _alignment(item: str) -> int:
    return _MAP_ALIGNMENT if item == _MAP else struct.calcsize(f"={item}")
