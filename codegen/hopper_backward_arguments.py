"""The run-time arguments of the kernels of a Hopper backward, in order."""

from __future__ import annotations

from flexc.codegen.arguments import Argument, Source, capture_arguments
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.bounds import BY_KEYS, range_roots
from flexc.codegen.hopper_backward_plan import KEYS, HopperBackwardPlan
from flexc.ir.expr import Expr
from flexc.ir.spec import AttentionSpec, Blocks

_STRIDES = {
    "q": Source.Q_STRIDE,
    "k": Source.K_STRIDE,
    "v": Source.V_STRIDE,
    "dout": Source.GRAD_OUT_STRIDE,
    "dq": Source.GRAD_Q_STRIDE,
    "dk": Source.GRAD_K_STRIDE,
    "dv": Source.GRAD_V_STRIDE,
}


def main_arguments(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Those of the large kernel. It does not read what its descriptors are made from."""
    spec = backward.forward
    ranges = backward.ranges(Entry.HOPPER)
    roots = [root for root in (spec.score, spec.mask) if root is not None]
    roots += [] if ranges is None else range_roots(ranges, BY_KEYS)
    pointers = (
        ("q", Source.Q), ("k", Source.K), ("v", Source.V), ("dout", Source.GRAD_OUT),
        ("dk", Source.GRAD_K), ("dv", Source.GRAD_V),
    )  # fmt: skip
    sums = (("delta", Source.DELTA), ("shift", Source.SHIFT), ("dq_sum", Source.GRAD_Q_SUM))
    return (
        *(
            Argument(f"{name}_ptr", f"*{spec.q_storage.value}", source, divisible=True)
            for name, source in pointers
        ),
        *(Argument(f"{name}_ptr", "*fp32", source, divisible=True) for name, source in sums),
        *_lost(plan),
        *capture_arguments(spec, names, roots),
        *_block_map(backward),
        *_strides(("q", "k", "v", "dout", "dk", "dv")),
        Argument("q_heads", "i32", Source.Q_HEADS),
        Argument("group", "i32", Source.GROUP),
        Argument("q_len", "i32", Source.Q_LEN),
        Argument("kv_len", "i32", Source.KV_LEN),
        Argument("scale", "fp32", Source.SCALE),
        Argument("batch", "i32", Source.BATCH),
        Argument("never", "i32", Source.NEVER),
        *_descriptors(spec, plan),
    )


def finish_arguments(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...], factor: Expr | None
) -> tuple[Argument, ...]:
    """Those of the kernel that finishes dQ; `factor` joins the scale."""
    spec = backward.forward
    return (
        Argument("dq_sum_ptr", "*fp32", Source.GRAD_Q_SUM, divisible=True),
        Argument("dq_ptr", f"*{spec.q_storage.value}", Source.GRAD_Q, divisible=True),
        *_lost(plan),
        *capture_arguments(spec, names, [] if factor is None else [factor]),
        *_strides(("dq",)),
        Argument("q_heads", "i32", Source.Q_HEADS),
        Argument("q_len", "i32", Source.Q_LEN),
        Argument("kv_len", "i32", Source.KV_LEN),
        Argument("scale", "fp32", Source.SCALE),
    )


def _lost(plan: HopperBackwardPlan) -> list[Argument]:
    return [Argument("lost_ptr", "*i32", Source.LOST)] if plan.rescue_nan else []


def _strides(tensors: tuple[str, ...]) -> list[Argument]:
    return [
        Argument(f"{tensor}_stride_{axis}", "i64", _STRIDES[tensor], dimension=d, divisible=True)
        for tensor in tensors
        for d, axis in enumerate(("b", "h", "s"))
    ]


def _block_map(backward: BackwardSpec) -> list[Argument]:
    """Of the map by rows of keys."""
    if backward.blocks(Entry.HOPPER) is not Blocks.MAP:
        return []
    return [
        Argument("map_offsets_ptr", "*i32", Source.MAP_OFFSETS),
        Argument("map_stretches_ptr", "*i32", Source.MAP_STRETCHES),
        Argument("map_stride_b", "i32", Source.MAP_STRIDE_B),
        Argument("map_stride_h", "i32", Source.MAP_STRIDE_H),
        Argument("map_block_q", "i32", Source.MAP_BLOCK_Q, divisible=True),
        Argument("map_block_kv", "i32", Source.MAP_BLOCK_KV, divisible=True),
    ]


def _descriptors(spec: AttentionSpec, plan: HopperBackwardPlan) -> list[Argument]:
    """A descriptor's type says its block. Results leave by warpgroup, half a tile at a time."""
    rows, keys, dim = plan.tiles.block_q, plan.tiles.block_kv, plan.padded_dim
    tensors = (
        ("q_desc", Source.Q_DESCRIPTOR, rows, spec.head_dim),
        ("k_desc", Source.K_DESCRIPTOR, keys, spec.head_dim),
        ("v_desc", Source.V_DESCRIPTOR, keys, spec.head_dim_v),
        ("dout_desc", Source.GRAD_OUT_DESCRIPTOR, rows, spec.head_dim_v),
        ("dk_desc", Source.GRAD_K_DESCRIPTOR, KEYS, spec.head_dim),
        ("dv_desc", Source.GRAD_V_DESCRIPTOR, KEYS, spec.head_dim_v),
    )
    element = spec.q_storage.value
    found = [
        Argument(
            name, f"tensordesc<{element}[1, 1, {n}, {dim}],{_layout(128, 16, 2)}>", source, dimension=size
        )
        for name, source, n, size in tensors
    ]
    whole = f"tensordesc<fp32[{rows}],{_layout(0, 32, 1)}>"
    half = f"tensordesc<fp32[{2 * plan.dq_columns}, 32],{_layout(128, 32, 2)}>"
    return [
        *found,
        Argument("shift_desc", whole, Source.SHIFT_DESCRIPTOR),
        Argument("delta_desc", whole, Source.DELTA_DESCRIPTOR),
        Argument("dq_sum_desc", half, Source.GRAD_Q_SUM_DESCRIPTOR, dimension=dim),
    ]


def _layout(swizzle: int, bits: int, rank: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank})"
