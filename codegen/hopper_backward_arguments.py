"""The run-time arguments of the kernels of a Hopper backward, in order."""

from __future__ import annotations

from collections.abc import Sequence

from flexc.codegen.arguments import (
    MAP_ARGUMENTS,
    ROW_MAP_ARGUMENTS,
    SHAPE_ARGUMENTS,
    Argument,
    Source,
    capture_arguments,
    descriptor_type,
    dropout_arguments,
    stride_arguments,
)
from flexc.codegen.backward_arguments import PAIRS_ARGUMENTS, capture_gradients, mod_roots, row_sums
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.bounds import BY_KEYS, range_roots
from flexc.codegen.hopper_backward_plan import KEYS, HopperBackwardPlan
from flexc.ir.expr import Expr
from flexc.ir.spec import AttentionSpec, Blocks


def main_arguments(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Those of the large kernel. It does not read what its descriptors are made from."""
    if plan.pairs:
        return _arguments_of_pairs(backward, plan, names)
    spec = backward.forward
    ranges = backward.ranges(Entry.HOPPER)
    by_map = backward.blocks(Entry.HOPPER) is Blocks.MAP
    roots = [root for root in (spec.score, spec.mask) if root is not None]
    roots += [] if ranges is None else range_roots(ranges, BY_KEYS)
    pointers = (
        ("q", Source.Q), ("k", Source.K), ("v", Source.V), ("dout", Source.GRAD_OUT),
        ("dk", Source.GRAD_K), ("dv", Source.GRAD_V),
    )  # fmt: skip
    sums: tuple[tuple[str, Source], ...] = (("delta", Source.DELTA), ("shift", Source.SHIFT))
    sums += () if plan.apart else (("dq_sum", Source.GRAD_Q_SUM),)
    return (
        *(
            Argument(f"{name}_ptr", f"*{spec.q_storage.value}", source, divisible=True)
            for name, source in pointers
        ),
        *(Argument(f"{name}_ptr", "*fp32", source, divisible=True) for name, source in sums),
        *_lost(plan),
        *_turns(plan),
        *capture_arguments(spec, names, roots),
        *(capture_gradients(backward, names) if backward.slots else ()),
        *(row_sums(backward) if backward.slots else ()),
        *(MAP_ARGUMENTS if by_map else ()),
        *(ROW_MAP_ARGUMENTS if by_map and plan.ordered else ()),
        *stride_arguments(("q", "k", "v", "dout", "dk", "dv"), divisible=True),
        *SHAPE_ARGUMENTS,
        Argument("batch", "i32", Source.BATCH),
        Argument("never", "i32", Source.NEVER),
        *dropout_arguments(spec),
        *((Argument("counter_ptr", "*i32", Source.COUNTER),) if plan.in_rounds else ()),
        *_descriptors(spec, plan),
    )


def _arguments_of_pairs(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Those of the large kernel where operands are pairs of fp16 numbers. Results are written in place."""
    spec, rows, keys = backward.forward, plan.tiles.block_q, plan.tiles.block_kv
    return (
        *PAIRS_ARGUMENTS,
        Argument("delta_ptr", "*fp32", Source.DELTA, divisible=True),
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
        Argument("dk_ptr", "*fp32", Source.GRAD_K, divisible=spec.aligned),
        Argument("dv_ptr", "*fp32", Source.GRAD_V, divisible=spec.aligned),
        *_lost(plan),
        *capture_arguments(spec, names, mod_roots(backward, Entry.HOPPER)),
        *(MAP_ARGUMENTS if backward.blocks(Entry.HOPPER) is Blocks.MAP else ()),
        *stride_arguments(("dk", "dv"), divisible=spec.aligned),
        *SHAPE_ARGUMENTS,
        Argument("batch", "i32", Source.BATCH),
        Argument("never", "i32", Source.NEVER),
        *pairs_descriptors(plan, (("q", rows), ("k", keys), ("v", keys), ("dout", rows))),
        *(row_descriptor(*which, rows) for which in _OF_QUERIES),
    )


def pairs_descriptors(plan: HopperBackwardPlan, tensors: Sequence[tuple[str, int]]) -> list[Argument]:
    """Those of pairs: the rows of all heads one after another, of which so many are copied."""
    width = 2 * plan.padded_dim
    return [
        Argument(f"{name}_desc", descriptor_type("fp16", (n, width)), _DESCRIPTORS[name], dimension=width)
        for name, n in tensors
    ]


def row_descriptor(name: str, source: Source, count: int) -> Argument:
    """That of a number a row."""
    return Argument(f"{name}_desc", descriptor_type("fp32", (count,)), source)


_DESCRIPTORS = {
    "q": Source.Q_PAIRS_DESCRIPTOR,
    "k": Source.K_PAIRS_DESCRIPTOR,
    "v": Source.V_PAIRS_DESCRIPTOR,
    "dout": Source.GRAD_OUT_PAIRS_DESCRIPTOR,
}
_OF_QUERIES = (
    ("shift", Source.SHIFT_DESCRIPTOR),
    ("delta", Source.DELTA_DESCRIPTOR),
    ("q_unit", Source.Q_UNIT_DESCRIPTOR),
    ("dout_unit", Source.GRAD_OUT_UNIT_DESCRIPTOR),
)


def finish_arguments(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...], factor: Expr | None
) -> tuple[Argument, ...]:
    """Those of the kernel that finishes dQ; `factor` joins the scale."""
    spec = backward.forward
    return (
        Argument("dq_sum_ptr", "*fp32", Source.GRAD_Q_SUM, divisible=True),
        Argument("dq_ptr", f"*{spec.q_storage.value}", Source.GRAD_Q, divisible=True),
        *_turns(plan),
        *_lost(plan),
        *capture_arguments(spec, names, [] if factor is None else [factor]),
        *stride_arguments(("dq",), divisible=True),
        Argument("q_heads", "i32", Source.Q_HEADS),
        Argument("q_len", "i32", Source.Q_LEN),
        Argument("kv_len", "i32", Source.KV_LEN),
        Argument("scale", "fp32", Source.SCALE),
    )


def _turns(plan: HopperBackwardPlan) -> list[Argument]:
    return [Argument("turns_ptr", "*i32", Source.TURNS)] if plan.ordered else []


def _lost(plan: HopperBackwardPlan) -> list[Argument]:
    return [Argument("lost_ptr", "*i32", Source.LOST)] if plan.rescue_nan else []


def _descriptors(spec: AttentionSpec, plan: HopperBackwardPlan) -> list[Argument]:
    """A descriptor's type says its block. Results leave by warpgroup, half a tile at a time."""
    rows, keys, dim = plan.tiles.block_q, plan.tiles.block_kv, plan.padded_dim
    if plan.in_parts:
        return _wide_descriptors(spec, plan)
    # In rounds dK of wide heads leaves as two blocks of columns, by tiles of dS.
    of_dk = rows if plan.in_rounds and plan.in_turns else dim
    tensors = (
        ("q_desc", Source.Q_DESCRIPTOR, rows, dim, spec.head_dim),
        ("k_desc", Source.K_DESCRIPTOR, keys, dim, spec.head_dim),
        ("v_desc", Source.V_DESCRIPTOR, keys, dim, spec.head_dim_v),
        ("dout_desc", Source.GRAD_OUT_DESCRIPTOR, rows, dim, spec.head_dim_v),
        ("dk_desc", Source.GRAD_K_DESCRIPTOR, KEYS, of_dk, spec.head_dim),
        ("dv_desc", Source.GRAD_V_DESCRIPTOR, KEYS, dim, spec.head_dim_v),
    )
    element = spec.q_storage.value
    found = [
        Argument(name, descriptor_type(element, (1, 1, n, columns)), source, dimension=size)
        for name, source, n, columns, size in tensors
    ]
    whole = descriptor_type("fp32", (rows,))
    if plan.apart:
        return [
            *found,
            Argument("shift_desc", whole, Source.SHIFT_DESCRIPTOR),
            Argument("delta_desc", whole, Source.DELTA_DESCRIPTOR),
        ]
    half = descriptor_type("fp32", (2 * plan.dq_columns, 32))
    return [
        *found,
        Argument("shift_desc", whole, Source.SHIFT_DESCRIPTOR),
        Argument("delta_desc", whole, Source.DELTA_DESCRIPTOR),
        Argument("dq_sum_desc", half, Source.GRAD_Q_SUM_DESCRIPTOR, dimension=dim),
    ]


def _wide_descriptors(spec: AttentionSpec, plan: HopperBackwardPlan) -> list[Argument]:
    """The same where q and k have a second block of columns."""
    rows, keys = plan.tiles.block_q, plan.tiles.block_kv
    first, tail = plan.padded_dim - plan.tail, plan.tail
    tensors = (
        ("q", Source.Q_DESCRIPTOR, rows, spec.head_dim, (first, tail)),
        ("k", Source.K_DESCRIPTOR, keys, spec.head_dim, (first, tail)),
        ("v", Source.V_DESCRIPTOR, keys, spec.head_dim_v, (plan.padded_dim_v,)),
        ("dout", Source.GRAD_OUT_DESCRIPTOR, rows, spec.head_dim_v, (plan.padded_dim_v,)),
        ("dk", Source.GRAD_K_DESCRIPTOR, KEYS, spec.head_dim, (first, tail)),
        ("dv", Source.GRAD_V_DESCRIPTOR, KEYS, spec.head_dim_v, (plan.padded_dim_v,)),
    )
    element = spec.q_storage.value
    found = [
        Argument(f"{name}{part}_desc", descriptor_type(element, (1, 1, n, columns)), source, dimension=size)
        for name, source, n, size, blocks in tensors
        for part, columns in zip(("", "_tail"), blocks, strict=False)
    ]
    whole = descriptor_type("fp32", (rows,))
    part = descriptor_type("fp32", (2 * plan.dq_columns, 32))
    return [
        *found,
        Argument("shift_desc", whole, Source.SHIFT_DESCRIPTOR),
        Argument("delta_desc", whole, Source.DELTA_DESCRIPTOR),
        Argument("dq_sum_desc", part, Source.GRAD_Q_SUM_DESCRIPTOR, dimension=plan.padded_dim),
    ]
