"""What a mod captures, a tensor or a number, and how a kernel reads it."""

from __future__ import annotations

import torch

from flexc.ir.types import SHORT_NUMBER, Storage

Value = torch.Tensor | int | float | bool

STORAGES = {
    torch.bool: Storage.BOOL,
    torch.uint8: Storage.U8,
    torch.int8: Storage.I8,
    torch.int16: Storage.I16,
    torch.int32: Storage.I32,
    torch.int64: Storage.I64,
    torch.float8_e4m3fn: Storage.FP8E4M3,
    torch.float16: Storage.FP16,
    torch.bfloat16: Storage.BF16,
    torch.float32: Storage.FP32,
    torch.float64: Storage.FP64,
}


def number_storage(value: int | float | bool) -> Storage | None:
    """How a Python number is passed to a kernel; None for an integer of more than 64 bits."""
    if isinstance(value, bool):
        return Storage.BOOL
    if isinstance(value, float):
        return Storage.FP32
    if abs(value) < SHORT_NUMBER:
        return Storage.I32
    return Storage.I64 if -(2**63) <= value < 2**63 else None


def told_apart(number: int | float | bool) -> int | float | str:
    """The number, or its text where it equals another one, as 0.0 does -0.0, or not even itself, as NaN."""
    if isinstance(number, float) and (number == 0.0 or number != number):
        return number.hex()
    return number
