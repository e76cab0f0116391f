"""Whether captured values are of the kind that a compiled kernel was made to read."""

from __future__ import annotations

import torch

from flexc.artifact import Artifact
from flexc.codegen.arguments import Source
from flexc.errors import LayoutMismatch, ShapeMismatch, UnsupportedDtype
from flexc.frontend.value import STORAGES, Value, number_storage
from flexc.ir.graph import Capture
from flexc.ir.types import Storage

_WIDTHS = {Storage.BOOL: 0, Storage.I32: 1, Storage.I64: 2, Storage.FP32: 3}
"""Numbers passed by value: each also takes what is written as a narrower one."""


def check_captures_fit(artifact: Artifact, values: tuple[Value, ...]) -> None:
    """Captured tensors have the element type, rank and last stride of the kernel, numbers a type it takes.

    Raises UnsupportedDtype, ShapeMismatch or LayoutMismatch.
    """
    loads = {a.slot for a in artifact.arguments if a.source is Source.CAPTURE}
    strides = {(a.slot, a.dimension) for a in artifact.arguments if a.source is Source.CAPTURE_STRIDE}
    for slot, (capture, value) in enumerate(zip(artifact.captures, values, strict=True)):
        if not isinstance(value, torch.Tensor):
            _check_number(capture, value)
            continue
        _check_tensor(capture, value)
        last = value.dim() - 1
        if slot in loads and last >= 0 and (slot, last) not in strides and value.stride(last) != 1:
            raise LayoutMismatch(
                f"the kernel reads {capture.name!r} with a last dimension that is contiguous; it has strides "
                f"{value.stride()}",
                hint=f"pass {capture.name}.contiguous()",
            )


def _check_number(capture: Capture, value: int | float | bool) -> None:
    if capture.rank is not None:
        raise UnsupportedDtype(
            f"the kernel was made for a tensor {capture.name!r}, not the number {value!r}",
            hint=f"pass a {capture.storage.value} tensor of {capture.rank} dimension(s)",
        )
    storage = number_storage(value)
    if storage is None or _WIDTHS[storage] > _WIDTHS[capture.storage]:
        raise UnsupportedDtype(
            f"the kernel was made for a number {capture.name!r} of type {capture.storage.value}, "
            f"which {value!r} is not",
            hint="compile it with a number of the wider type, or call flexc.attention",
        )


def _check_tensor(capture: Capture, value: torch.Tensor) -> None:
    if capture.rank is None:
        raise UnsupportedDtype(
            f"the kernel was made for a number {capture.name!r}, not a tensor", hint="pass a Python number"
        )
    if STORAGES.get(value.dtype) is not capture.storage:
        raise UnsupportedDtype(
            f"the kernel was made for {capture.name!r} of type {capture.storage.value}, not {value.dtype}",
            hint="cast it, or compile a kernel for it",
        )
    if value.dim() != capture.rank:
        raise ShapeMismatch(
            f"the kernel was made for {capture.name!r} of {capture.rank} dimension(s), "
            f"not of shape {tuple(value.shape)}",
            hint="pass a tensor of that rank, or compile a kernel for it",
        )
