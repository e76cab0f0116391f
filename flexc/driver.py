"""The CUDA driver through ctypes: load a cubin, launch a kernel. It needs no compiler or other package."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from flexc.errors import BackendUnavailable, InternalError

_MAX_DYNAMIC_SHARED_SIZE = 8
_DEFAULT_SHARED = 48 * 1024
_CAPTURE_MODE_RELAXED = 2
CLOCK_IN_KHZ = 13
"""The attribute of a device that says its highest clock, see `attribute`."""
INVALID_CONTEXT = 201
"""A thread that has made no CUDA call of its own yet has no context, though its process has one."""


_COMES_EARLY = 6
_KNOWS_EARLY = 12030
"""The driver that first captured such launches in graphs."""


class LaunchAttribute(ctypes.Structure):
    """One of a launch; of its value, which has 64 bytes, the first four."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class Geometry:
    """How a kernel is launched: threads and bytes of shared memory of a block, programs, and the stream.

    One that `comes_early` may begin before the kernel before it on the stream has ended.
    """

    def __init__(self, threads: int, shared: int, *, comes_early: bool) -> None:
        self.config = LaunchConfig((1, 1, 1), (threads, 1, 1), shared)
        self._attribute = LaunchAttribute(_COMES_EARLY, 0, 1)
        self._reference = ctypes.byref(self.config)
        if comes_early and version() >= _KNOWS_EARLY:
            self.config.attributes = ctypes.pointer(self._attribute)
            self.config.count = 1

    def of(self, programs: int, stream: int) -> Any:
        """A reference to what the driver wants, good until the next call."""
        self.config.grid[0] = programs
        self.config.stream = stream
        return self._reference


@lru_cache(maxsize=1)
def library() -> Any:
    """libcuda, whose calls keep the interpreter lock: a launch is shorter than giving it away.

    Raises:
        BackendUnavailable: there is no NVIDIA driver.
    """
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailable(
            "there is no NVIDIA driver on this machine (libcuda.so.1)", hint='compute with backend="cpu"'
        ) from error


def check(status: int, what: str) -> None:
    """Raise InternalError with the driver's own words unless `status` is success."""
    if status == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    library().cuGetErrorString(status, ctypes.byref(text))
    raise InternalError(f"{what}: {(name.value or b'?').decode()}: {(text.value or b'').decode()}")


def load_function(cubin: bytes, name: str, shared: int) -> ctypes.c_void_p:
    """The function `name` of `cubin` in the current context, allowed `shared` bytes of shared memory."""
    cuda = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)  # loading is no part of a graph that may be captured just now
    check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "loading a kernel")
    try:
        check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), "loading a kernel")
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
    if shared > _DEFAULT_SHARED:
        check(
            cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, shared),
            f"{shared} bytes of shared memory",
        )
    return function


@lru_cache(maxsize=1)
def version() -> int:
    """The newest CUDA that the driver knows: major * 1000 + minor * 10."""
    found = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(found)), "asking for the driver's version")
    return found.value


def attribute(which: int, device: int) -> int:
    """One of the driver's numbers about the GPU of that index."""
    cuda = library()
    handle, value = ctypes.c_int(), ctypes.c_int()
    check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"finding GPU {device}")
    check(cuda.cuDeviceGetAttribute(ctypes.byref(value), which, handle), f"asking about GPU {device}")
    return value.value


def write_zeros(address: int, size: int, device: int) -> None:
    """Zeros in `size` bytes at `address`, on the current stream of `device`, which is the current device."""
    ensure_context(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    arguments = (ctypes.c_void_p(address), 0, ctypes.c_size_t(size), ctypes.c_void_p(stream))
    check(library().cuMemsetD8Async(*arguments), "writing zeros")


def make_current(device: int) -> None:
    """Give this thread the context that PyTorch uses on `device`."""
    check(library().cuCtxSetCurrent(_primary_context(device)), f"using GPU {device}")


def ensure_context(device: int) -> None:
    """Give this thread that context if it has none, as one that has made no CUDA call of its own."""
    context = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(context)), "asking for the context of a thread")
    if not context.value:
        make_current(device)


@lru_cache(maxsize=64)
def _primary_context(device: int) -> ctypes.c_void_p:
    cuda = library()
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"finding GPU {device}")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"using GPU {device}")
    return context


def capture_id(stream: int) -> int:
    """The number of the graph that `stream` is being captured into, unique in this process."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    check(found, "asking whether a CUDA graph is captured")
    return number.value
