"""The arguments of a Hopper forward kernel."""

from __future__ import annotations

from flexc.codegen.arguments import Argument, Source, descriptor_type, forward_arguments
from flexc.codegen.blocks import ranges_of
from flexc.codegen.bounds import range_roots
from flexc.codegen.hopper_plan import HopperPlan
from flexc.codegen.hopper_rows import block_of_rows
from flexc.ir.spec import AttentionSpec


def hopper_arguments(spec: AttentionSpec, plan: HopperPlan, names: tuple[str, ...]) -> tuple[Argument, ...]:
    """Those of the portable kernel, the batch, and a TMA descriptor each of q, k, v and out.

    A descriptor's type says its block: batch, head, rows, columns; where a tile has rows of several heads,
    batch, head of keys, its query heads, rows, columns. Its value is made from the tensor.
    """
    keys = (1, 1, plan.tiles.block_kv)
    dims, dims_v = (
        (spec.head_dim, plan.padded_dim, plan.tails[0]),
        (spec.head_dim_v, plan.padded_dim_v, plan.tails[1]),
    )
    tensors = (
        ("q", Source.Q_DESCRIPTOR, block_of_rows(plan), dims),
        ("k", Source.K_DESCRIPTOR, keys, dims),
        ("v", Source.V_DESCRIPTOR, keys, dims_v),
        ("out", Source.OUT_DESCRIPTOR, block_of_rows(plan), dims_v),
    )
    descriptors = []
    for name, source, block, (dim, whole, tail) in tensors:
        for part, columns in ((f"{name}_desc", whole - tail), (f"{name}_tail_desc", tail)):
            if columns:
                kind = descriptor_type(spec.q_storage.value, (*block, columns))
                descriptors.append(Argument(part, kind, source, dimension=dim))
    ranges = ranges_of(spec)
    return (
        *forward_arguments(spec, names, [] if ranges is None else range_roots(ranges)),
        Argument("batch", "i32", Source.BATCH),
        *(() if plan.walks else (Argument("counter_ptr", "*i32", Source.COUNTER),)),
        *descriptors,
    )
