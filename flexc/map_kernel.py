"""Kernels that make or change block maps: compiled once a source and target, or interpreted on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch

from flexc._version import __version__
from flexc.artifact import Artifact
from flexc.codegen.arguments import Argument, Source
from flexc.codegen.map_module import NUM_WARPS, MapKernel
from flexc.codegen.target import Target
from flexc.errors import BackendUnavailable
from flexc.frontend.value import Value
from flexc.gpu_facts import target_of
from flexc.ir.printer import digest
from flexc.launcher import Launcher
from flexc.pack import captured

Named = Mapping[str, torch.Tensor | int]


class Runner(Protocol):
    """A kernel ready to be launched on tensors of one device."""

    def __call__(self, programs: int, named: Named, values: Sequence[Value] = ()) -> None:
        """Launch. `named` are the arguments that the kernel calls so, `values` the captures by slot."""
        ...


def runner_for(kernel: MapKernel, device: torch.device) -> Runner:
    """The kernel for `device`: a GPU, or the CPU under `TRITON_INTERPRET=1`.

    Raises:
        BackendUnavailable: the device is neither.
        UnsupportedTarget: a GPU that flexc has no kernels for.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return _Compiled(kernel, compiled(kernel, target_of(index)), index)
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailable(
            f"block maps are built on a GPU, not on {device}",
            hint="set TRITON_INTERPRET=1 before Triton is imported to try the kernel on the CPU",
        )
    return _Interpreted(kernel)


class _Compiled:
    def __init__(self, kernel: MapKernel, launcher: Launcher, device: int) -> None:
        self._kernel, self._launcher, self._device = kernel, launcher, device

    def __call__(self, programs: int, named: Named, values: Sequence[Value] = ()) -> None:
        packed = _packed(self._kernel.arguments, named, values)
        pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in packed]
        if torch.cuda.current_device() == self._device:
            self._launcher.launch(programs, self._device, pointers)
            return
        with torch.cuda.device(self._device):
            self._launcher.launch(programs, self._device, pointers)


class _Interpreted:
    def __init__(self, kernel: MapKernel) -> None:
        self._kernel, self._entry = kernel, _interpreted_entry(kernel)

    def __call__(self, programs: int, named: Named, values: Sequence[Value] = ()) -> None:
        self._entry[(programs,)](*_packed(self._kernel.arguments, named, values))


def _packed(arguments: Sequence[Argument], named: Named, values: Sequence[Value]) -> list[Any]:
    return [
        named[a.name] if a.source is Source.NAMED else captured(a, values[a.slot], lambda x: x)
        for a in arguments
    ]


_launchers: dict[tuple[MapKernel, str], Launcher] = {}
_lock = Lock()


def compiled(kernel: MapKernel, target: Target) -> Launcher:
    """The launcher of a kernel for a target, compiled or taken from the cache on disk at most once."""
    found = _launchers.get((kernel, target.name))
    if found is None:
        with _lock:
            found = _launchers.get((kernel, target.name))
            if found is None:
                found = _launchers[kernel, target.name] = Launcher(artifact_for(kernel, target))
    return found


def artifact_for(kernel: MapKernel, target: Target) -> Artifact:
    """The compiled kernel, from the cache on disk where it is there."""
    from flexc import cache
    from flexc.compiler import triton_version

    key = digest(kernel.source, kernel.entry, target.name, __version__, triton_version())
    return cache.get_or_build(key, lambda scratch: _build(kernel, target, key, scratch))


def _build(kernel: MapKernel, target: Target, key: str, scratch: Path) -> Artifact:
    from flexc.compiler import Entry, compile_entry, parameter_count
    from flexc.toolchain import resources_of

    path = scratch / "kernel.py"
    path.write_text(kernel.source)
    code = compile_entry(path, Entry(kernel.entry, kernel.arguments, target.capability, NUM_WARPS, 1))
    return Artifact(
        key=key,
        description=kernel.description,
        target=target.name,
        entry=code.name,
        source=kernel.source,
        cubin=code.cubin,
        ptx=code.ptx,
        ttgir=code.ttgir,
        shared=code.shared,
        num_warps=code.num_warps,
        block_q=0,
        block_kv=0,
        parameters=parameter_count(code.ptx, code.name),
        resources=resources_of(code.cubin, shared=code.shared, warps=code.num_warps),
        arguments=kernel.arguments,
        captures=kernel.captures,
        requires=(),
        explanation=kernel.description,
        flexc_version=__version__,
        triton_version=code.triton_version,
    )


@lru_cache(maxsize=256)
def _interpreted_entry(kernel: MapKernel) -> Any:
    from flexc.compiler import import_file

    path = Path(tempfile.mkdtemp(prefix="flexc-interpret-")) / "kernel.py"
    path.write_text(kernel.source)
    return getattr(import_file(path), kernel.entry)
