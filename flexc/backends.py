"""Which backend computes a call, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flexc.call import AttentionCall, Gradients, Result
from flexc.errors import UnknownOption, UnsupportedFeature

if TYPE_CHECKING:
    from flexc.prepared import Place

BACKENDS = ("auto", "triton", "hopper", "cpu", "reference")
ON_GPU = ("auto", "triton", "hopper")
"""What kernels compute; "auto" takes the kernels that serve a GPU best."""

_LATER = {"blackwell": "the Blackwell kernels"}

Wanted = frozenset[str | int]
"""What needs a gradient: "q", "k", "v", "sinks", and the slots of captured tensors."""


def choose(backend: str, device: torch.device) -> str:
    """The name of the backend that `backend` means for tensors on `device`.

    Raises:
        UnknownOption: there is no such backend.
        UnsupportedFeature: this version does not have it, or has none for the device.
    """
    if backend == "auto":
        if device.type not in ("cuda", "cpu"):
            raise UnsupportedFeature(
                f"there is no backend for {device.type} tensors", hint="move them to a GPU or the CPU"
            )
        backend = "auto" if device.type == "cuda" else "cpu"
    if backend in _LATER:
        raise UnsupportedFeature(f'backend="{backend}": this version does not have {_LATER[backend]}')
    if backend not in BACKENDS:
        raise UnknownOption(f"there is no backend {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
    return backend


def forward(call: AttentionCall, backend: str, place: Place | None = None) -> Result:
    """The result of a call on the backend of that name, one of `choose`.

    Autograd sees only what the reference computes. With a `place`, a launch on the GPU is kept for calls that
    repeat it.
    """
    call = _with_seed(call, backend)
    if backend == "reference":
        from flexc import reference

        return reference.run(call)
    if backend in ON_GPU:
        from flexc import gpu
        from flexc.refit import refitted

        return gpu.run(refitted(call), place, backend)
    from flexc import cpu

    return cpu.run(call)


def _with_seed(call: AttentionCall, backend: str) -> AttentionCall:
    """The call with its seed as a number, which all but GPU kernels want."""
    if not call.dropout_p or backend in ON_GPU:
        return call
    return replace(call, dropout_seed=int(call.dropout_seed))


def backward(
    call: AttentionCall,
    backend: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The gradients that are `wanted`, of the results of `forward` and the gradients with regard to them."""
    call = _with_seed(call, backend)
    if backend == "reference":
        from flexc import reference

        return reference.backward(call, out, lse, grad_out, grad_lse, wanted)
    if backend in ON_GPU:
        from flexc import gpu_backward
        from flexc.refit import refitted

        return gpu_backward.backward(refitted(call), out, lse, grad_out, grad_lse, wanted, backend)
    from flexc import cpu_backward

    return cpu_backward.backward(call, out, lse, grad_out, grad_lse, wanted)
