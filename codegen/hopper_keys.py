"""How the roles of a Hopper kernel learn which keys a tile of queries needs, and what they need of each key.

One warp finds out and loads; it tells the warpgroups that compute, through shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flexc.codegen.bounds import Bounds
from flexc.codegen.hoisting import Element, Hoisting
from flexc.codegen.hopper_plan import HopperPlan
from flexc.codegen.hopper_words import gluon, mentions, needed, others, target_of
from flexc.ir.expr import topological
from flexc.ir.ops import Op
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import DType

_TILE = ("b", "h", "q_start")
_BOUNDS = ("kv_first", "kv_end", "full_first", "full_end")
_STORED = {
    DType.BOOL: ("gl.int8", "{}.to(gl.int8)"),
    DType.I32: ("gl.int32", "{}"),
    DType.I64: ("gl.int64", "{}"),
    DType.F32: ("gl.float32", "{}"),
}


@dataclass(frozen=True, slots=True)
class Vector:
    """A value of each key that the loading warp leaves in shared memory, since it comes from memory."""

    name: str
    smem: str
    element: str
    stored: str
    read: str
    of_mask: bool


@dataclass(frozen=True, slots=True)
class Keys:
    """How the roles of a kernel learn which keys a tile of queries needs.

    `steps_told`: the loading warp tells of every tile of keys which it is. Otherwise what it `told` of the
    tile of queries says that. `lines` compute bounds in the loading warp; `own_lines` those of the rows of
    one warpgroup, where they differ by whole tiles of keys. `masked`: when the mask applies to a tile of
    keys, as the warpgroups see it and as the loading warp does; None without a mask.
    """

    steps_told: bool
    told: tuple[str, ...]
    comments: tuple[str, ...]
    lines: tuple[str, ...]
    own_lines: tuple[str, ...]
    masked: str | None
    masked_in_load: str | None

    @property
    def told_keys(self) -> bool:
        """Whether what is told of a tile says its keys."""
        return len(self.told) > len(_TILE)


def keys_of(spec: AttentionSpec, plan: HopperPlan, bounds: Bounds | None) -> Keys:
    """How the kernel of a plan learns its keys, from the closed form `bounds` where there is one."""
    if bounds is None and spec.blocks is not Blocks.MAP:
        return Keys(False, _TILE, (), (), (), None, None)
    comments = () if bounds is None else tuple(f"# {comment}" for comment in bounds.comments)
    lines = () if bounds is None else _of_rows(bounds.lines)
    if bounds is None or bounds.count > 1:
        masked = "(kv_start < full_first) | (kv_start >= full_end)"
        return Keys(True, _TILE, comments, lines, (), "(note & 1) == 1", masked)
    told = [name for name in _BOUNDS if name in map(target_of, bounds.lines)]
    own: tuple[str, ...] = ()
    # Warpgroups whose rows lie within one tile of keys of each other have the same tiles to visit.
    if plan.head_rows > plan.tiles.block_kv and not bounds.reads_rows:
        told = ["kv_first", "kv_end"]
        text = "\n".join(gluon(bounds.lines))
        text = re.sub(r"\bBLOCK_Q\b", "ROWS", re.sub(r"\bq_start\b", "own_start", text))
        own = (*comments, *text.split("\n"))
        comments = ()
    return Keys(False, (*_TILE, *told), comments, lines, own, bounds.masked, bounds.masked)


def _of_rows(lines: Sequence[str]) -> tuple[str, ...]:
    """Bounds that are vectors over the rows are reduced by functions of the file."""
    return tuple(line.replace("gl.min(", "lowest(").replace("gl.max(", "highest(") for line in gluon(lines))


def is_idle(name: str, conditions: Sequence[str]) -> bool:
    """Whether a bound is one of those that only say where the mask applies, and `conditions` read it not."""
    return name.startswith("full_") and not mentions(name, conditions)


def lines_of_loads(hoisting: Hoisting, keys: Keys, staged: Sequence[str]) -> tuple[str, ...]:
    """What the loading warp computes once a tile of queries: bounds, and what its `staged` lines read."""
    users = keys.lines if keys.steps_told else keys.told[len(_TILE) :]
    lines = needed(gluon([*hoisting.head, *hoisting.row, *keys.lines]), [*users, *staged])
    return (*keys.comments, *lines)


def vectors_of(
    hoisting: Hoisting, near: frozenset[str], mask_lines: Sequence[str], elements: Sequence[Element]
) -> tuple[Vector, ...]:
    """What elements read of a column, if it comes from memory."""
    read = {a for element in elements for a in element.arguments}
    found = []
    for node, name in hoisting.bound.items():
        loads = any(part.op is Op.LOAD for part in topological(node))
        if name not in read or name in near or not loads or place(node)[node] is not Placement.COLUMN:
            continue
        element, stored = _STORED[node.dtype]
        smem = f"{name}_smem"
        value = f"of_keys({smem}.index(slot), column_layout)"
        value = f"{value} != 0" if node.dtype is DType.BOOL else value
        of_mask = name in map(target_of, mask_lines)
        found.append(Vector(name, smem, element, stored.format(name), value, of_mask))
    return tuple(found)


def lines_in_step(
    lines: Sequence[str], vectors: Sequence[Vector], elements: Sequence[Element]
) -> tuple[str, ...]:
    """What a step still computes of a column besides `vectors`."""
    rest = others(gluon(lines), frozenset(v.name for v in vectors))
    return needed(rest, [a for e in elements for a in e.arguments])


def buffers_of(plan: HopperPlan, steps_told: bool, vectors: Sequence[Vector]) -> list[str]:
    """What the roles share: the names of shared memory and barriers."""
    names = ["q_smem", "k_smem", "v_smem"]
    names += ["q_tail_smem", "k_tail_smem"] if plan.tails[0] else []
    names += ["v_tail_smem"] if plan.tails[1] else []
    names += [] if plan.out_through_q else ["out_smem", *(["out_tail_smem"] if plan.tails[1] else [])]
    names += [f"{of}_{what}" for of in "qkv" for what in ("ready", "free")]
    names += ["tile_smem", "tile_ready", "tile_free"]
    names += ["lost_smem", *(["sums_smem"] if plan.lean else []), "where_smem"] if plan.rescue_nan else []
    names += ["sums_smem"] if plan.lazy_max and not plan.lean else []
    return [*names, *(["note_smem"] if steps_told else []), *(v.smem for v in vectors)]
