"""How the rows of a Hopper tile belong to heads: to one, or to all that share keys and values.

Rows of several heads come by TMA from a tensor that is seen as (batch, head of keys, its query heads, rows,
columns): a box of that fills the rows of a warpgroup, HEAD_ROWS of each head, and what lies past the heads of
a group or the rows of a head is read as 0 and not written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexc.codegen.hopper_plan import ROWS, HopperPlan
from flexc.codegen.preamble import Constant


@dataclass(frozen=True, slots=True)
class TileRows:
    """Names of what a tile is of. With `packed`, what a tile is told to be of is a head of keys."""

    packed: bool
    heads: str
    """How many a batch has."""
    head_rows: str
    """The constant that is the number of rows of a head in a warpgroup."""
    place: str
    """The head, as TMA takes it."""
    first_head: str
    done_head: str
    """The first query head of a tile, where rows are computed again, and of the tile before."""
    launch: tuple[str, ...]
    """How to launch the kernel: lines of its file's header."""


_WARPS = "tiles. num_warps=4; the roles that are not the program's own have warps besides."
_OF_ONE = TileRows(
    packed=False,
    heads="q_heads",
    head_rows="ROWS",
    place="h, ",
    first_head="h",
    done_head="done_h",
    launch=("Launch any number of programs: they share cdiv(q_len, BLOCK_Q) * q_heads * batch", _WARPS),
)
_OF_MANY = TileRows(
    packed=True,
    heads="kv_heads",
    head_rows="HEAD_ROWS",
    place="h, 0, ",
    first_head="first_head",
    done_head="done_h * group",
    launch=(
        "Launch any number of programs: they share",
        "cdiv(q_len, BLOCK_Q) * (q_heads // group) * batch",
        _WARPS,
    ),
)


_WALKING = replace(
    _OF_ONE,
    launch=(
        "Launch a multiple of q_heads * batch programs: those of a head share",
        "its cdiv(q_len, BLOCK_Q) tiles. num_warps=4.",
    ),
)


def tile_rows(plan: HopperPlan) -> TileRows:
    """Those of a plan."""
    if plan.walks:
        return _WALKING
    return _OF_MANY if plan.packed_heads > 1 else _OF_ONE


def block_of_rows(plan: HopperPlan) -> tuple[int, ...]:
    """The block of a descriptor of q or out that fills the rows of a warpgroup, less its columns."""
    if plan.packed_heads == 1:
        return (1, 1, ROWS)
    return (1, 1, plan.packed_heads, ROWS // plan.packed_heads)


def row_constants(plan: HopperPlan) -> tuple[Constant, ...]:
    """The rows of a tile, of a warpgroup, and of a head there."""
    if plan.walks:
        return (
            Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a tile"),
            Constant("ROWS", ROWS, "as many as a warpgroup takes"),
        )
    consumers = Constant("CONSUMERS", plan.consumers, "warpgroups that share them")
    if plan.packed_heads == 1:
        return (
            Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a tile"),
            consumers,
            Constant("ROWS", ROWS, "query rows of each"),
        )
    return (
        Constant("BLOCK_Q", plan.head_rows, "query rows of each head in a tile"),
        consumers,
        Constant("ROWS", ROWS, "query rows of each, of all heads together"),
        Constant("HEAD_ROWS", ROWS // plan.packed_heads, "those of one head"),
    )
