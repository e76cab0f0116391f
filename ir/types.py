"""Value types of graph nodes, and element types of the tensors that graphs read."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """What a graph node computes in. Score arithmetic is F32; the golden reference widens it to 64 bits."""

    BOOL = "bool"
    I32 = "i32"
    I64 = "i64"
    F32 = "f32"

    @property
    def is_integer(self) -> bool:
        return self in (DType.I32, DType.I64)

    @property
    def is_float(self) -> bool:
        return self is DType.F32


_RANK = {DType.BOOL: 0, DType.I32: 1, DType.I64: 2, DType.F32: 3}


def promote(*dtypes: DType) -> DType:
    """The type that holds all of `dtypes`: bool < i32 < i64 < f32, as PyTorch promotes tensors."""
    return max(dtypes, key=_RANK.__getitem__)


class Storage(Enum):
    """Element type of a tensor in memory. `value` is Triton's spelling."""

    BOOL = "i1"
    U8 = "u8"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    FP8E4M3 = "fp8e4nv"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def dtype(self) -> DType:
        """The type that a loaded element is computed in."""
        return _COMPUTED_IN[self]

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        return self.dtype is DType.F32


_COMPUTED_IN = {
    Storage.BOOL: DType.BOOL,
    Storage.U8: DType.I32,
    Storage.I8: DType.I32,
    Storage.I16: DType.I32,
    Storage.I32: DType.I32,
    Storage.I64: DType.I64,
    Storage.FP8E4M3: DType.F32,
    Storage.FP16: DType.F32,
    Storage.BF16: DType.F32,
    Storage.FP32: DType.F32,
    Storage.FP64: DType.F32,
}
_ITEMSIZE = {
    Storage.BOOL: 1,
    Storage.U8: 1,
    Storage.I8: 1,
    Storage.I16: 2,
    Storage.I32: 4,
    Storage.I64: 8,
    Storage.FP8E4M3: 1,
    Storage.FP16: 2,
    Storage.BF16: 2,
    Storage.FP32: 4,
    Storage.FP64: 8,
}


SHORT_NUMBER = 2**30
"""Integers below it are passed to a kernel in 32 bits: it may add an index to one without overflow."""
