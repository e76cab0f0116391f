"""A GPU that is none: CPU tensors that say they are on one, and launches that Triton's interpreter runs.

What is launched, with which addresses and how often, is the real thing; so is what it computes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexc.build
import flexc.gpu
import flexc.launch
from flexc import driver
from flexc.codegen.arguments import Argument, Source
from flexc.codegen.pipeline import lower
from flexc.codegen.target import TARGETS
from flexc.interpret import OPTIONS, at_address, entry_of, with_addresses
from flexc.ir.spec import AttentionSpec
from flexc.launcher import Launcher


class InterpretingLauncher(Launcher):
    """Launches by address, as a driver does."""

    def __init__(self, arguments: Sequence[Argument], entry: Any) -> None:
        self._arguments = arguments
        self._entry = entry

    def launch(self, programs: int, device: int, values: Sequence[Any]) -> None:
        self._entry[(programs,)](*map(at_address, self._arguments, values))

    def repeat(self, programs: int, device: int, values: Sequence[Any]) -> Callable[[tuple[int, ...]], None]:
        return lambda addresses: self.launch(programs, device, with_addresses(values, addresses))


_kernels: dict[tuple[Any, ...], Any] = {}


def _kernel_for(spec: AttentionSpec, target: str, options: tuple[Any, ...] = (), *rest: Any) -> Any:
    found = _kernels.get((spec, options))
    if found is None:
        generated = lower(spec, TARGETS["sm80"], options=dict((*OPTIONS, *options)))
        plan = generated.plan
        found = _kernels[spec, options] = SimpleNamespace(
            artifact=SimpleNamespace(
                arguments=generated.arguments,
                block_q=plan.head_rows,
                block_kv=plan.tiles.block_kv,
                packed_heads=plan.packed_heads,
                shares_heads=False,
                shares_tiles=False,
            ),
            returns_lse=any(a.source is Source.LSE for a in generated.arguments),
            launcher=InterpretingLauncher(generated.arguments, entry_of(generated)),
        )
    return found


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all tensors are on the faked GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(driver, "write_zeros", lambda address, size, device: ctypes.memset(address, 0, size))
    monkeypatch.setattr(flexc.build, "kernel_for", _kernel_for)
    monkeypatch.setattr(flexc.gpu, "target_of", lambda index: TARGETS["sm80"])
    monkeypatch.setattr(flexc.launch, "processors", lambda index: 4)
