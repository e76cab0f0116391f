"""Constants of the generated file of a Hopper backward."""

from __future__ import annotations

from flexc.codegen.backward_spec import ROWS_PADDED_TO, BackwardSpec, Entry
from flexc.codegen.hopper_backward_plan import KEYS, HopperBackwardPlan
from flexc.codegen.preamble import LOG2E, Constant
from flexc.ir.spec import Blocks
from flexc.ir.types import Storage

OPERANDS = {Storage.BF16: "gl.bfloat16", Storage.FP16: "gl.float16", Storage.FP32: "gl.float16"}
"""Element types of the operands of products; fp32 is multiplied as pairs."""
WALK = 8
"""Steps whose tiles shared memory tells."""
_RESIDENT = 128
"""About how many programs a GPU of this kind runs at a time."""


def constants_of(backward: BackwardSpec, plan: HopperBackwardPlan) -> tuple[Constant, ...]:
    """Those of the large kernel."""
    tiles, dim = plan.tiles, plan.padded_dim
    constants = [
        Constant("BLOCK_KV", tiles.block_kv, "keys of a program"),
        Constant("KEYS", KEYS, "keys of each of its two warpgroups"),
        Constant("BLOCK_Q", tiles.block_q, "queries of a step"),
        Constant(
            "Q_STAGES", tiles.num_stages, "tiles of queries that shared memory holds; of dO it holds two"
        ),
        *(
            _widths(plan)
            if plan.in_parts
            else [Constant("PADDED_DIM", dim, "head dimension, to a power of two")]
        ),
        Constant("DQ_COLUMNS", plan.dq_columns, "columns of a warpgroup's part of dQ, which has 64 rows"),
        *_bytes(plan),
        *(existing_columns(backward) if plan.pairs else ()),
        Constant(
            "ROWS_PADDED_TO", ROWS_PADDED_TO, "rows of a head of delta, shift and the sums are padded to"
        ),
        Constant("WALK", WALK, "steps whose rows shared memory tells"),
    ]
    if backward.blocks(Entry.HOPPER) is not Blocks.ALL:
        constants.append(Constant("L2_ROWS", 32768, "rows of queries, dO and dQ that the L2 cache holds"))
    elif plan.ordered:
        constants.append(Constant("RESIDENT", _RESIDENT, "about how many programs run at a time"))
    return (
        *constants,
        Constant("OPERAND", OPERANDS[backward.forward.q_storage], "element type of all but the sums"),
        LOG2E,
    )


def _widths(plan: HopperBackwardPlan) -> list[Constant]:
    """What constants say of wide heads."""
    return [
        Constant("PADDED_DIM", plan.padded_dim, "head dimension of q and k, to the sum of the next two"),
        Constant("FIRST_DIM", plan.padded_dim - plan.tail, "columns of its first block"),
        Constant("TAIL_DIM", plan.tail, "columns of the second"),
        Constant("PADDED_DIM_V", plan.padded_dim_v, "head dimension of v, to a power of two"),
    ]


def _bytes(plan: HopperBackwardPlan) -> list[Constant]:
    """What TMA brings at a time."""
    tiles, dim, dim_v = plan.tiles, plan.padded_dim, plan.padded_dim_v
    if plan.in_parts:
        return [
            Constant("K_BYTES", tiles.block_kv * dim * 2, "of the keys"),
            Constant("V_BYTES", tiles.block_kv * dim_v * 2, "of the values"),
            Constant("Q_BYTES", tiles.block_q * dim * 2, "of a tile of queries"),
            Constant("DOUT_BYTES", tiles.block_q * dim_v * 2, "of a tile of dO"),
        ]
    size = 4 if plan.pairs else 2
    return [
        Constant("KV_BYTES", tiles.block_kv * dim * size, "of the keys, and of the values"),
        Constant("Q_BYTES", tiles.block_q * dim * size, "of a tile of queries, and of dO"),
    ]


def existing_columns(backward: BackwardSpec) -> list[Constant]:
    """Columns of results that there are."""
    spec = backward.forward
    return [
        Constant("HEAD_DIM", spec.head_dim, "of which these exist"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "and these of v"),
    ]
