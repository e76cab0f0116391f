"""The named numbers at the top of a generated Hopper forward."""

from __future__ import annotations

from flexc.codegen.hopper_keys import Keys
from flexc.codegen.hopper_plan import ROWS, HopperPlan, has_slope
from flexc.codegen.hopper_rows import row_constants
from flexc.codegen.preamble import LN2, LOG2E, Constant
from flexc.codegen.softmax_form import MARGIN, MARGIN_OF_SLOPES, MOST_SHIFT, TOO_LARGE, TOO_SMALL, usual
from flexc.ir.spec import AttentionSpec
from flexc.ir.types import Storage

ELEMENT = {Storage.BF16: "gl.bfloat16", Storage.FP16: "gl.float16"}


def constants_of(spec: AttentionSpec, plan: HopperPlan, keys: Keys) -> tuple[Constant, ...]:
    """The constants of a Hopper forward, in the order of its file."""
    tiles = plan.tiles
    constants = [
        *row_constants(plan),
        Constant("BLOCK_KV", tiles.block_kv, "keys of a step"),
        Constant("STAGES", tiles.num_stages, "tiles of keys, and of values, that shared memory holds"),
        *_dims("DIM", "q and k", plan.padded_dim, plan.tails[0]),
        *_dims("DIM_V", "v", plan.padded_dim_v, plan.tails[1]),
        Constant("Q_BYTES", ROWS * plan.padded_dim * 2, "of one warpgroup's rows"),
        Constant("K_BYTES", tiles.block_kv * plan.padded_dim * 2, "of a tile of keys"),
        Constant("V_BYTES", tiles.block_kv * plan.padded_dim_v * 2, "of a tile of values"),
        _of_rows(plan),
        Constant("PARTS", 8, "in which columns of a row are looked at: a thread has two of them"),
        *(() if plan.walks else _of_roles(plan, keys)),
        Constant("OPERAND", ELEMENT[spec.q_storage], "element type of q, k, v and out"),
        LOG2E,
    ]
    if keys.own_lines:
        constants += [
            Constant(
                "SKIP_FIRST", tiles.num_stages // 2, "tiles of keys that a warpgroup may pass over at first"
            ),
            Constant("SKIP_LAST", (tiles.num_stages - 1) // 2, "and at last"),
        ]
    if plan.lean or plan.lazy_max:
        constants.append(Constant("THREADS", 128, "of a warpgroup"))
    if plan.turns:
        constants.append(
            Constant("FIRST_TURN", 8, "number of a barrier in hardware, the first of those for the turns")
        )
    if plan.rescue_nan:
        constants += [
            Constant("HEAD_DIM", spec.head_dim, "of which these exist"),
            Constant("HEAD_DIM_V", spec.head_dim_v, "and these"),
            Constant("FEW_KEYS", 16, "keys of a step where values are left out"),
            Constant("FEW_DIMS", 32, "columns of its operands and result"),
        ]
    if plan.guessed:
        margin = MARGIN_OF_SLOPES if has_slope(spec) else MARGIN
        constants += [
            Constant(
                "MARGIN", margin, "so much larger may scores be in base 2, besides the range of weights"
            ),
            Constant("TOO_LARGE", TOO_LARGE, "makes sums infinite beside which 1 is nothing"),
        ]
        if not has_slope(spec):
            about = "so near to zero scores are, in base 2, where no shift moves"
            constants.append(Constant("USUAL", usual(margin), about))
        else:
            constants.append(Constant("TOO_SMALL", TOO_SMALL, "sums below lack weights that became 0"))
    if plan.bounded:
        constants.append(
            Constant("MOST_SHIFT", MOST_SHIFT, "of scores in base 2: sums of the largest weights fit a float")
        )
    if spec.return_lse and plan.guessed:
        constants.append(Constant("LIFT", 2.0 ** (margin / 2), "its square is 2**MARGIN"))
    if spec.return_lse:
        constants.append(LN2)
    return tuple(constants)


def _of_rows(plan: HopperPlan) -> Constant:
    """What shared memory holds of rows, or what is plain to see for them."""
    if plan.walks:
        seen = (plan.tiles.num_stages - 1) * plan.tiles.block_kv
        return Constant("SEEN", seen, "keys that a row sees where the mask is plain")
    return Constant("Q_TILES", plan.q_tiles, "tiles of query rows that shared memory holds")


def _of_roles(plan: HopperPlan, keys: Keys) -> tuple[Constant, ...]:
    """How the loading warp shares out tiles, and tells of them."""
    return (
        Constant("TILES", 4, "tiles of queries that the loading warp may be ahead of the others"),
        Constant("TOLD", len(keys.told), "numbers that the loading warp tells the others of each"),
        Constant("L2_KEYS", plan.l2_keys, "keys with values that fit the L2 cache together"),
    )


def _dims(name: str, of: str, dim: int, tail: int) -> tuple[Constant, ...]:
    """The head dimension in its parts."""
    if not tail:
        return (Constant(f"PADDED_{name}", dim, f"head dimension of {of}, to a power of two"),)
    return (
        Constant(f"PADDED_{name}", dim - tail, f"first part of the head dimension of {of}"),
        Constant(f"TAIL_{name}", tail, "the other part, to a power of two"),
    )
