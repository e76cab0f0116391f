"""Masks by equal ids, `doc[q_idx] == doc[kv_idx]`: ranges of keys once it is known where equal ids lie.

The ids are data, so no formula gives the ranges; but two pairs of vectors do, of the shape of the ids:

- `run_first`, `run_end`: the positions around i that hold the id of i without a gap, i among them;
- `hull_first`, `hull_end`: the first position that holds the id of i, and behind the last one.

All keys of a row lie in the hull, and all of the run are seen. Where ids are contiguous, both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flexc.ir.build import input_, load
from flexc.ir.closed_form import best
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.ranges import Ranges
from flexc.ir.simplify import simplify
from flexc.ir.solve import Runs
from flexc.ir.types import DType


@dataclass(frozen=True, slots=True)
class IdEquality:
    """`comparison` is `ids[..., q_idx] == ids[..., kv_idx]` (or `!=`), `slot` that of the ids.

    `leading` are the indices before the position, the same on both sides; they read nothing of the key.
    """

    comparison: Expr
    slot: int
    leading: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class IdRuns:
    """The slots of the vectors that `closed_form_with_runs` reads for the ids in slot `ids`: int32 tensors.

    Each has the shape of the ids, whose last dimension counts positions.
    """

    ids: int
    run_first: int
    run_end: int
    hull_first: int
    hull_end: int


@lru_cache(maxsize=512)
def find_id_equalities(mask: Expr) -> tuple[IdEquality, ...]:
    """The comparisons in `mask`, simplified, of one tensor's ids at `q_idx` and at `kv_idx`; each once."""
    root = simplify(mask)
    placements = place(root)
    found = (_equality(node, placements) for node in topological(root))
    return tuple(equality for equality in found if equality is not None)


def _equality(node: Expr, placements: Mapping[Expr, Placement]) -> IdEquality | None:
    if node.op not in (Op.EQ, Op.NE) or node.args[0].dtype.is_float:
        return None
    sides = [_without_cast(arg) for arg in node.args]
    if not all(side.op is Op.LOAD and side.args for side in sides) or sides[0].attr != sides[1].attr:
        return None
    slot, leading = sides[0].attr, sides[0].args[:-1]
    positions = {_without_cast(side.args[-1]) for side in sides}
    if sides[1].args[:-1] != leading or positions != {input_(Input.Q_IDX), input_(Input.KV_IDX)}:
        return None
    if not isinstance(slot, int) or any(placements[index] >= Placement.COLUMN for index in leading):
        return None
    return IdEquality(node, slot, leading)


def _without_cast(x: Expr) -> Expr:
    """Before a conversion that keeps different numbers apart."""
    return x.args[0] if x.op is Op.CAST and x.dtype is DType.I64 and not x.args[0].dtype.is_float else x


@lru_cache(maxsize=512)
def closed_form_with_runs(
    mask: Expr, first_new_slot: int, *, contiguous: bool = False
) -> tuple[Ranges | None, tuple[IdRuns, ...]]:
    """As `closed_form`, with the vectors of runs as further captures.

    Ranges reach over the hull, full parts over the run. The new slots count from `first_new_slot`, four a
    tensor of ids, in the order of `IdRuns`. Where `contiguous`, the caller vouches that hull and run are the
    same everywhere, and the ranges read the run only, exactly; otherwise they are of any length. Without ids:
    what `closed_form` says.
    """
    mask = simplify(mask)
    equalities = find_id_equalities(mask)
    of_ids: dict[int, IdRuns] = {}
    runs: dict[Expr, Runs] = {}
    for equality in equalities:
        start = first_new_slot + 4 * len(of_ids)
        vectors = of_ids.setdefault(
            equality.slot, IdRuns(equality.slot, start, start + 1, start + 2, start + 3)
        )
        runs[equality.comparison] = _bounds(equality, vectors, contiguous)
    ranges = best(mask, runs, any_length=not contiguous)
    return ranges, tuple(of_ids.values())


def _bounds(equality: IdEquality, vectors: IdRuns, contiguous: bool) -> Runs:
    index = (*equality.leading, input_(Input.Q_IDX))
    run_first, run_end = (load(slot, index, DType.I32) for slot in (vectors.run_first, vectors.run_end))
    if contiguous:
        return Runs(run_first, run_end, run_first, run_end)
    hull_first, hull_end = (load(slot, index, DType.I32) for slot in (vectors.hull_first, vectors.hull_end))
    return Runs(run_first, run_end, hull_first, hull_end)
