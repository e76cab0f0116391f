"""The run-time arguments of a kernel, in order, and where each one's value comes from.

The list is part of the generated module and of saved kernels: a launcher needs nothing else to call one.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from flexc.ir.expr import Expr, topological
from flexc.ir.graph import Capture
from flexc.ir.ops import Op
from flexc.ir.spec import AttentionSpec, Blocks, Captured
from flexc.ir.types import Storage


class Source(Enum):
    """Where the value of an argument comes from; `slot` and `dimension` say which one."""

    Q = "q"
    K = "k"
    V = "v"
    OUT = "out"
    LSE = "lse"
    SINKS = "sinks"
    CAPTURE = "capture"
    CAPTURE_STRIDE = "capture_stride"
    CAPTURE_SIZE = "capture_size"
    SCALAR = "scalar"
    MAP_OFFSETS = "map_offsets"
    MAP_STRETCHES = "map_stretches"
    MAP_STRIDE_B = "map_stride_b"
    MAP_STRIDE_H = "map_stride_h"
    MAP_BLOCK_Q = "map_block_q"
    MAP_BLOCK_KV = "map_block_kv"
    Q_STRIDE = "q_stride"
    K_STRIDE = "k_stride"
    V_STRIDE = "v_stride"
    OUT_STRIDE = "out_stride"
    Q_HEADS = "q_heads"
    GROUP = "group"
    Q_LEN = "q_len"
    KV_LEN = "kv_len"
    SCALE = "scale"
    NAMED = "named"
    """What the kernel calls it is all that is to be said: an argument of a kernel that is no attention."""
    BATCH = "batch"
    COUNTER = "counter"
    Q_DESCRIPTOR = "q_descriptor"
    K_DESCRIPTOR = "k_descriptor"
    V_DESCRIPTOR = "v_descriptor"
    OUT_DESCRIPTOR = "out_descriptor"
    GRAD_OUT_DESCRIPTOR = "grad_out_descriptor"
    GRAD_Q_DESCRIPTOR = "grad_q_descriptor"
    GRAD_K_DESCRIPTOR = "grad_k_descriptor"
    GRAD_V_DESCRIPTOR = "grad_v_descriptor"
    GRAD_Q_SUM_DESCRIPTOR = "grad_q_sum_descriptor"
    DELTA_DESCRIPTOR = "delta_descriptor"
    SHIFT_DESCRIPTOR = "shift_descriptor"
    Q_PAIRS_DESCRIPTOR = "q_pairs_descriptor"
    K_PAIRS_DESCRIPTOR = "k_pairs_descriptor"
    V_PAIRS_DESCRIPTOR = "v_pairs_descriptor"
    GRAD_OUT_PAIRS_DESCRIPTOR = "grad_out_pairs_descriptor"
    Q_UNIT_DESCRIPTOR = "q_unit_descriptor"
    K_UNIT_DESCRIPTOR = "k_unit_descriptor"
    V_UNIT_DESCRIPTOR = "v_unit_descriptor"
    GRAD_OUT_UNIT_DESCRIPTOR = "grad_out_unit_descriptor"
    NEVER = "never"
    """0, which the compiler does not know."""
    LOST = "lost"
    """A number that becomes 1 when a NaN came out."""
    TURNS = "turns"
    """Zeros at first: how many programs have begun, and for each tile of rows who added to its dQ last."""
    ROW_MAP_OFFSETS = "row_map_offsets"
    ROW_MAP_STRETCHES = "row_map_stretches"
    ROW_MAP_STRIDE_B = "row_map_stride_b"
    ROW_MAP_STRIDE_H = "row_map_stride_h"
    DROPOUT_SEED = "dropout_seed"
    DROPPED_BELOW = "dropped_below"
    SURVIVORS_WEIGHT = "survivors_weight"
    # Of the backward.
    GRAD_OUT = "grad_out"
    GRAD_LSE = "grad_lse"
    DELTA = "delta"
    SHIFT = "shift"
    GRAD_Q = "grad_q"
    GRAD_K = "grad_k"
    GRAD_V = "grad_v"
    GRAD_Q_SUM = "grad_q_sum"
    GRAD_K_PARTS = "grad_k_parts"
    GRAD_V_PARTS = "grad_v_parts"
    GRAD_SINKS_PARTS = "grad_sinks_parts"
    Q_PAIRS = "q_pairs"
    K_PAIRS = "k_pairs"
    V_PAIRS = "v_pairs"
    GRAD_OUT_PAIRS = "grad_out_pairs"
    Q_UNIT = "q_unit"
    K_UNIT = "k_unit"
    V_UNIT = "v_unit"
    GRAD_OUT_UNIT = "grad_out_unit"
    GRAD_CAPTURE = "grad_capture"
    PLACED_SUMS = "placed_sums"
    """What is added up by row or distance before it goes to captured gradients; `slot` is the scatter's."""
    ROW_SUMS = "row_sums"
    """Sums by row from which a gradient of heads is corrected; `slot` is the scatter's, or -1 of all."""
    GRAD_OUT_STRIDE = "grad_out_stride"
    GRAD_Q_STRIDE = "grad_q_stride"
    GRAD_K_STRIDE = "grad_k_stride"
    GRAD_V_STRIDE = "grad_v_stride"
    HEADS_PER_PROGRAM = "heads_per_program"


@dataclass(frozen=True, slots=True)
class Argument:
    """`type` is Triton's: `*bf16`, `i32`, `i64`, `fp32`, `tensordesc<...>`. `divisible`: a multiple of 16.

    Of a TMA descriptor, `dimension` is the length of the tensor's last dimension.
    """

    name: str
    type: str
    source: Source
    slot: int = 0
    dimension: int = 0
    divisible: bool = False


# What a kernel knows of each range of a closed form; numbered where there are several.
_OF_A_RANGE = (
    "kv_first", "kv_end", "q_first", "q_end", "full_first", "full_end", "row_first", "row_end", "has_keys",
    "column_first", "column_end", "has_rows", "rank", "unvisited",
)  # fmt: skip
# Names that generated files use besides those of the mods' captures.
RESERVED = frozenset({
    "tl", "triton", "b", "h", "kv_h", "q", "k", "v", "score", "grad", "q_idx", "kv_idx", "q_len", "kv_len",
    "q_heads", "group", "scale", "rows", "columns", "dims", "dims_v", "pid", "q_tiles", "q_start",
    "q_tile", "k_tile", "v_tile", "acc", "row_max", "row_sum", "p", "sink", "score_scale", "to_log2",
    "in_range", "allowed", "stretch", "at", "map_row", "first_stretch",
    "end_stretch", "whole_end", "kv_start", "q_last", "kv_last",
    *(f"{name}{number}" for number in ("", *(f"_{n}" for n in range(1, 9))) for name in _OF_A_RANGE),
    "out", "out_tile", "lse", "lse_row", "range", "float", "BLOCK_Q", "BLOCK_KV", "PADDED_DIM",
    "PADDED_DIM_V", "HEAD_DIM", "HEAD_DIM_V", "PRECISION", "LOG2E", "LN2", "floor_div", "floor_mod", "sign",
    "sine", "cosine", "sine_cosine", "arctan", "gdc_launch_dependents", "gdc_wait",
    "tanh", "power", "online_softmax", "score_mod", "mask_mod", "attention_forward",
    "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "sinks_ptr", "map_offsets_ptr", "map_stretches_ptr",
    "map_stride_b", "map_stride_h", "map_block_q", "map_block_kv",
    "dout", "dq", "dk", "dv", "dout_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "dlse_ptr", "delta_ptr",
    "shift_ptr", "dq_sum_ptr", "dk_parts_ptr", "dv_parts_ptr", "dsinks_parts_ptr", "dlse", "delta",
    "shift", "dout_tile", "dq_tile", "dk_tile", "dv_tile", "dk_part", "dv_part", "row_offsets",
    "padded_len", "padded_at", "ROWS", "ROWS_PADDED_TO", "strange", "kv_tiles", "kv_heads", "head", "parts",
    "part", "first_head", "heads_per_program", "in_rows", "in_columns", "row_at",
    "part_at", "score_mod_grad", "attention_backward_rows", "attention_backward_kv",
    "attention_backward_q", "attention_backward_fused", "attention_backward_q_sums", "dq_sum", "dq_sum_tile",
    "dq_sum_stride", "hangs_over", "finite_k", "total", "SLICES", "slice_start", "piece", "piece_dims",
    "left", "right", "q_rows", "k_rows", "v_rows", "dout_rows", "PIECE", "member", "modified", "kept",
    "random_words", "words_of", "philox", "surviving", "survives", "weight", "seed", "seed_ptr",
    "dropped_below", "survivors_weight", "stream", "live",
    "element", "inside", "lost_ptr", "sums", "distance", "q_idx_at", "kv_idx_at",
    "add_exactly", "diagonal_sums", "distances", "over_tile", "DISTANCES", "SIDE", "q_idx_of", "kv_idx_of",
    "batch", "programs", "these_keys", "these_rows", "apart", "near", "far", "places", "here", "word",
    "tiles", "BLOCK", "add_shared", "add_shared_exactly", "attention_backward_captured",
    *(f"sums_{n}_ptr" for n in range(64)),
    "units_of", "split", "product", "coarse", "fine", "unit", "pair_offsets",
    "pair_offsets_v", "kv_at", "padded_kv", "split_any", "product_of_any",
    "head_count", "whole_first",
    *(f"{tensor}_{part}" for tensor in ("q", "k", "v", "dout") for part in ("pairs", "unit", "fine")),
    *(f"{tensor}_{part}_ptr" for tensor in ("q", "k", "v", "dout") for part in ("pairs", "unit")),
    *(f"{tensor}_stride_{axis}" for tensor in ("q", "k", "v", "out") for axis in "bhs"),
    *(f"{tensor}_stride_{axis}" for tensor in ("dout", "dq", "dk", "dv") for axis in "bhs"),
})  # fmt: skip


def capture_names(captures: tuple[Capture, ...], reserved: frozenset[str] = RESERVED) -> tuple[str, ...]:
    """An identifier for each capture, near the user's own name; names derived from it are distinct too."""
    names: list[str] = []
    taken = set(reserved)
    for capture in captures:
        name = re.sub(r"\W+", "_", capture.name, flags=re.ASCII).strip("_") or "captured"
        if name[0].isdigit() or keyword.iskeyword(name) or name in reserved:
            name = f"user_{name}"
        base, n = name, 2
        while taken & (used := _derived(name, capture.rank or 0)):
            name, n = f"{base}_{n}", n + 1
        taken |= used
        names.append(name)
    return tuple(names)


def _derived(name: str, rank: int) -> set[str]:
    """The names that `capture_arguments` may make of one."""
    sizes = {f"{name}_{fact}_{d}" for fact in ("stride", "size") for d in range(rank)}
    return {name, f"{name}_ptr", f"{name}_grad_ptr", *sizes}


def scalar_type(storage: Storage) -> str:
    """How a captured Python number travels: booleans as 0 or 1 in an i32."""
    return {Storage.BOOL: "i32", Storage.FP32: "fp32", Storage.I32: "i32", Storage.I64: "i64"}[storage]


def capture_arguments(spec: Captured, names: tuple[str, ...], roots: Sequence[Expr]) -> list[Argument]:
    """The arguments of the captures that the graphs `roots` still read, by slot."""
    loads, sizes, scalars = _reads(roots)
    arguments: list[Argument] = []
    for slot, (capture, name) in enumerate(zip(spec.captures, names, strict=True)):
        if slot in scalars:
            arguments.append(Argument(name, scalar_type(capture.storage), Source.SCALAR, slot))
        rank = capture.rank or 0
        if slot in loads:
            pointer = "*i8" if capture.storage is Storage.BOOL else f"*{capture.storage.value}"
            arguments.append(Argument(f"{name}_ptr", pointer, Source.CAPTURE, slot))
            dims = range(rank - 1 if slot in spec.unit_stride else rank)
            arguments += [Argument(f"{name}_stride_{d}", "i64", Source.CAPTURE_STRIDE, slot, d) for d in dims]
        wanted = range(rank) if slot in loads else sorted(d for s, d in sizes if s == slot)
        arguments += [Argument(f"{name}_size_{d}", "i32", Source.CAPTURE_SIZE, slot, d) for d in wanted]
    return arguments


def _reads(roots: Sequence[Expr]) -> tuple[set[int], set[tuple[int, int]], set[int]]:
    loads: set[int] = set()
    sizes: set[tuple[int, int]] = set()
    scalars: set[int] = set()
    for node in topological(*roots):
        if node.op is Op.LOAD and isinstance(node.attr, int):
            loads.add(node.attr)
        elif node.op is Op.SCALAR and isinstance(node.attr, int):
            scalars.add(node.attr)
        elif node.op is Op.SIZE and isinstance(node.attr, tuple):
            sizes.add(node.attr)
    return loads, sizes, scalars


MAP_ARGUMENTS = (
    Argument("map_offsets_ptr", "*i32", Source.MAP_OFFSETS),
    Argument("map_stretches_ptr", "*i32", Source.MAP_STRETCHES),
    Argument("map_stride_b", "i32", Source.MAP_STRIDE_B),
    Argument("map_stride_h", "i32", Source.MAP_STRIDE_H),
    Argument("map_block_q", "i32", Source.MAP_BLOCK_Q, divisible=True),
    Argument("map_block_kv", "i32", Source.MAP_BLOCK_KV, divisible=True),
)
"""Of a kernel that walks a block map, by rows of queries or of keys."""
ROW_MAP_ARGUMENTS = (
    Argument("row_map_offsets_ptr", "*i32", Source.ROW_MAP_OFFSETS),
    Argument("row_map_stretches_ptr", "*i32", Source.ROW_MAP_STRETCHES),
    Argument("row_map_stride_b", "i32", Source.ROW_MAP_STRIDE_B),
    Argument("row_map_stride_h", "i32", Source.ROW_MAP_STRIDE_H),
)
"""Of one that walks a map by rows of keys, and also reads it by rows of queries."""
SHAPE_ARGUMENTS = (
    Argument("q_heads", "i32", Source.Q_HEADS),
    Argument("group", "i32", Source.GROUP),
    Argument("q_len", "i32", Source.Q_LEN),
    Argument("kv_len", "i32", Source.KV_LEN),
    Argument("scale", "fp32", Source.SCALE),
)
_STRIDES = {
    "q": Source.Q_STRIDE,
    "k": Source.K_STRIDE,
    "v": Source.V_STRIDE,
    "out": Source.OUT_STRIDE,
    "dout": Source.GRAD_OUT_STRIDE,
    "dq": Source.GRAD_Q_STRIDE,
    "dk": Source.GRAD_K_STRIDE,
    "dv": Source.GRAD_V_STRIDE,
}


def stride_arguments(tensors: Sequence[str], *, divisible: bool) -> list[Argument]:
    """Those of batch, head and row of each tensor; that of the last dimension is 1."""
    return [
        Argument(f"{tensor}_stride_{axis}", "i64", _STRIDES[tensor], dimension=d, divisible=divisible)
        for tensor in tensors
        for d, axis in enumerate(("b", "h", "s"))
    ]


def descriptor_type(element: str, block: Sequence[int]) -> str:
    """Triton's name of a TMA descriptor's type. Rows of blocks are swizzled, by up to 128 bytes."""
    bits = 32 if element == "fp32" else 16
    swizzle = min(128, block[-1] * bits // 8) if len(block) > 1 else 0
    layout = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={min(2, len(block))}"
    return f"tensordesc<{element}{list(block)},NVMMASharedLayout({layout})>"


def forward_arguments(
    spec: AttentionSpec, names: tuple[str, ...], extra: Sequence[Expr] = ()
) -> tuple[Argument, ...]:
    """All arguments of a forward kernel, in order; `extra` are graphs that it computes besides the mods."""
    whole = spec.aligned
    tensors = [
        Argument("q_ptr", f"*{spec.q_storage.value}", Source.Q, divisible=whole),
        Argument("k_ptr", f"*{spec.k_storage.value}", Source.K, divisible=whole),
        Argument("v_ptr", f"*{spec.v_storage.value}", Source.V, divisible=whole),
        Argument("out_ptr", f"*{spec.q_storage.value}", Source.OUT, divisible=whole),
    ]
    if spec.return_lse:
        tensors.append(Argument("lse_ptr", "*fp32", Source.LSE))
    if spec.has_sinks:
        tensors.append(Argument("sinks_ptr", "*fp32", Source.SINKS))
    return (
        *tensors,
        *capture_arguments(spec, names, [r for r in (spec.score, spec.mask, *extra) if r is not None]),
        *(MAP_ARGUMENTS if spec.blocks is Blocks.MAP else ()),
        *stride_arguments(("q", "k", "v", "out"), divisible=whole),
        *SHAPE_ARGUMENTS,
        *dropout_arguments(spec),
    )


def dropout_arguments(spec: AttentionSpec) -> list[Argument]:
    """What dropout takes at each call: where its seed is, and two numbers that say how much."""
    if not spec.dropout:
        return []
    return [
        Argument("seed_ptr", "*i64", Source.DROPOUT_SEED),
        Argument("dropped_below", "i64", Source.DROPPED_BELOW),
        Argument("survivors_weight", "fp32", Source.SURVIVORS_WEIGHT),
    ]
