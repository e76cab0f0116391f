"""Where the kernels of a backward come from: compiled for a GPU, or run by Triton's interpreter."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Protocol

import torch

from flexc.backward_script import Runnable
from flexc.call import AttentionCall
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.target import Target


class Runner(Protocol):
    """Gives the kernels of the backwards of one device."""

    @property
    def target(self) -> Target:
        """What its kernels are made for."""

    def kernel(self, backward: BackwardSpec, entry: Entry, call: AttentionCall) -> Runnable:
        """One kernel of the backward of a call."""


@lru_cache(maxsize=16)
def runner_on(device: torch.device) -> Runner:
    """What runs the kernels of a backward on a device.

    Raises:
        BackendUnavailable: it is no GPU, and Triton's interpreter was not asked for.
    """
    if device.type == "cuda":
        from flexc.launch_backward import Compiler

        return Compiler(device)
    if os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu":
        from flexc.interpret_backward import Interpreter

        return Interpreter()
    from flexc.errors import BackendUnavailable

    raise BackendUnavailable(
        f'backend="triton" needs CUDA tensors; q is on {device}',
        hint='use backend="cpu", or set TRITON_INTERPRET=1 before Triton is imported',
    )
