"""Launches one compiled kernel: arguments are packed into one block of memory, whose layout is made once."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from threading import Lock

import torch

from flexc import driver
from flexc.artifact import Artifact

_FORMAT = {"i32": "i", "i64": "q", "fp32": "f"}
_SIZE = {"i": 4, "q": 8, "f": 4, "P": 8}


class Launcher:
    """`launch` costs a few microseconds: one pack, one driver call."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        formats = ["P" if a.type.startswith("*") else _FORMAT[a.type] for a in artifact.arguments]
        self._extra = artifact.parameters - len(
            formats
        )  # pointers of Triton's own, which this kernel does not use
        formats += ["P"] * self._extra
        self._struct = struct.Struct("@" + "".join(formats))
        self._block = ctypes.create_string_buffer(self._struct.size)
        base, offset = ctypes.addressof(self._block), 0
        addresses = []
        for item in formats:
            offset = -(-offset // _SIZE[item]) * _SIZE[item]
            addresses.append(base + offset)
            offset += _SIZE[item]
        self._pointers = (ctypes.c_void_p * len(formats))(*addresses)
        self._nothing = (0,) * self._extra
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()
        self._threads = 32 * artifact.num_warps

    def launch(self, programs: int, device: int, values: Sequence[object]) -> None:
        """Run `programs` programs on the current stream of `device`, which is the current device."""
        function = self._functions.get(device)
        if function is None:
            function = self._load(device)
        stream = torch._C._cuda_getCurrentRawStream(device)
        cuda = driver.library()
        with self._lock:
            self._struct.pack_into(self._block, 0, *values, *self._nothing)
            arguments = (
                function, programs, 1, 1, self._threads, 1, 1, self._artifact.shared,
                ctypes.c_void_p(stream), self._pointers, None,
            )  # fmt: skip
            status = cuda.cuLaunchKernel(*arguments)
            if status == driver.INVALID_CONTEXT:
                driver.make_current(device)
                status = cuda.cuLaunchKernel(*arguments)
        if status:
            driver.check(status, f"launching {self._artifact.description}")

    def _load(self, device: int) -> ctypes.c_void_p:
        driver.make_current(device)
        function = driver.load_function(self._artifact.cubin, self._artifact.entry, self._artifact.shared)
        self._functions[device] = function
        return function
