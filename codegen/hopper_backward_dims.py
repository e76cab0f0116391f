"""How a Hopper backward holds heads: padded dimensions, and which of its kernels is for which of them.

dK and dV of 64 keys stay in registers. Up to 128 dimensions a warpgroup has both, and room for two tiles of
scores. With 192 of q and k and 128 of v there is room for one. Above, each warpgroup has one of dK and dV,
and dQ has a kernel of its own. So it is in fp32, whose rows are pairs of fp16 numbers: twice 128 columns.
"""

from __future__ import annotations

from flexc.codegen.backward_spec import BackwardSpec
from flexc.ir.spec import AttentionSpec
from flexc.ir.types import Storage

NARROW, WIDE, IN_PARTS, APART = 64, 128, 192, 256
"""Padded head dimensions of q and k, by kernel."""
PART = 64
"""Columns of dQ that are computed at a time with `IN_PARTS`."""


def is_of_pairs(backward: BackwardSpec) -> bool:
    """Whether operands are pairs of fp16 numbers, which fp32 is multiplied as."""
    return backward.forward.q_storage is Storage.FP32


def is_apart(backward: BackwardSpec) -> bool:
    """Whether dQ has a kernel of its own: also where its sums are to have one order, and come in parts."""
    spec = backward.forward
    if is_of_pairs(backward):
        return True
    if spec.head_dim > IN_PARTS or spec.head_dim_v > WIDE:
        return True
    return backward.deterministic and spec.head_dim > WIDE


def is_in_parts(backward: BackwardSpec) -> bool:
    """Whether q and k have a second block of columns, and dQ comes in three parts."""
    return backward.forward.head_dim > WIDE and not is_apart(backward)


def dims(backward: BackwardSpec) -> tuple[int, int]:
    """Head dimensions of q and v as the kernel handles them: whole 128-byte swizzles."""
    if is_of_pairs(backward):
        return WIDE, WIDE
    if is_apart(backward):
        return APART, APART
    if is_in_parts(backward):
        return IN_PARTS, WIDE
    spec = backward.forward
    return _width(spec), _width_v(spec)


def parts_of_dq(backward: BackwardSpec, groups: int) -> int:
    """In how many parts dQ of a tile is computed, if so many warpgroups compute."""
    return IN_PARTS // PART if is_in_parts(backward) else groups


def _width(spec: AttentionSpec) -> int:
    return NARROW if spec.head_dim <= NARROW else WIDE


def _width_v(spec: AttentionSpec) -> int:
    return NARROW if spec.head_dim_v <= NARROW else WIDE
