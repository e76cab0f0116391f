"""The keys of a row as text: the closed form of a mask, and why it has none."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch

from flexc.id_vectors import id_vectors
from flexc.ir.build import binary, const
from flexc.ir.closed_form import Obstacle, closed_form, obstacles
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.id_runs import closed_form_with_runs, find_id_equalities
from flexc.ir.magnitude import WIDTH
from flexc.ir.ops import Input, Op
from flexc.ir.printer import to_formula
from flexc.ir.ranges import Ranges, Within
from flexc.ir.simplify import simplify
from flexc.ir.symbolic import without_saturation
from flexc.ir.types import DType

_LONGEST_FORMULA = 60


def has_formula(mask: Expr, values: Sequence[object], q_len: int, kv_len: int) -> bool:
    """Whether the keys of a row are exactly what a formula says, for these lengths and captures."""
    ranges = closed_form(mask)
    return ranges is not None and ranges.is_exact and ranges.holds(values, q_len, kv_len)


def keys_of_a_row(
    mask: Expr, captures: Sequence[Capture], values: Sequence[object], q_len: int, kv_len: int
) -> list[str]:
    """Lines on the keys that a query sees: ranges of `kv_idx`, then how they serve or what is in their way.

    Args:
        mask: a traced mask.
        captures: what it reads, by slot.
        values: the captures' values, by slot.
        q_len: the number of queries.
        kv_len: the number of keys.
    """
    names = [capture.name for capture in captures]
    exact = closed_form(mask)
    if exact is None or not exact.is_exact:
        why_not = [f"no closed form: {_reason(o, names)}" for o in obstacles(mask)]
    elif exact.holds(values, q_len, kv_len):
        return [*_listed(exact, names), "exact: no map is needed"]
    else:
        failed = [w for w in exact.requires if not _holds(w, values, kv_len)]
        where = " and ".join(_condition(w, names) for w in failed) or f"kv_len <= {exact.longest:,}"
        why_not = [*_listed(exact, names), f"not here: this holds where {where}"]
    return _in_part(mask, names, values, (q_len, kv_len)) + list(dict.fromkeys(why_not))


def _in_part(
    mask: Expr, names: Sequence[str], values: Sequence[object], lengths: tuple[int, int]
) -> list[str]:
    """What is known of the keys of a row where no formula says it all: with ids, where equal ones lie."""
    slots = {equality.slot for equality in find_id_equalities(mask)}
    side_by_side = bool(slots) and all(_are_side_by_side(values[slot]) for slot in slots)
    ranges, of_ids = closed_form_with_runs(mask, len(names), contiguous=side_by_side)
    if ranges is None or not ranges.holds(values, *lengths):
        return []
    names = list(names)
    for ids in of_ids:
        names += [f"{names[ids.ids]}.{end}" for end in ("run_first", "run_end", "hull_first", "hull_end")]
    lines = []
    for r in ranges.ranges:
        line = _range(r.first, r.end, names)
        lines.append(line if r.is_exact else f"at most {line}")
        if not r.is_exact and r.full_first is not r.full_end:
            lines.append(f"all of {_range(r.full_first, r.full_end, names)}")
    if of_ids and side_by_side:
        lines.append("run: the keys with the id of q_idx; equal ids lie side by side here")
    elif of_ids:
        lines.append("run: the keys around q_idx with its id; hull: from the first such key to the last")
    return lines


def _are_side_by_side(ids: object) -> bool:
    """Whether equal ids, along the last dimension, have no other id between them."""
    if not isinstance(ids, torch.Tensor):
        return False
    vectors = id_vectors(ids)
    return torch.equal(vectors.run_first, vectors.hull_first) and torch.equal(
        vectors.run_end, vectors.hull_end
    )


def _listed(ranges: Ranges, names: Sequence[str]) -> list[str]:
    return [_range(r.first, r.end, names) for r in ranges.ranges] or ["no key at all"]


def _range(first: Expr, end: Expr, names: Sequence[str]) -> str:
    """`first <= kv_idx < end` with the condition on the row behind it."""
    first, end = without_saturation(first), without_saturation(end)
    condition = ""
    if end.op is Op.WHERE and _is_number(end.args[2], 0):
        condition = f" if {to_formula(end.args[0], names)}"
        end = end.args[1]
    below = "" if _is_number(first, 0) else f"{to_formula(first, names)} <= "
    if end.attr is Input.KV_LEN:
        return (f"{below}kv_idx" if below else "every kv_idx") + condition
    last = simplify(binary(Op.SUB, end, const(1)))
    if _size(last) <= _size(end):
        return f"{below}kv_idx <= {to_formula(last, names)}{condition}"
    return f"{below}kv_idx < {to_formula(end, names)}{condition}"


def _size(root: Expr) -> int:
    return 1 + sum(_size(arg) for arg in root.args)


def _is_number(x: Expr, number: int) -> bool:
    return x.op is Op.CONST and x.attr == number


def _reason(obstacle: Obstacle, names: Sequence[str]) -> str:
    formula = textwrap.shorten(to_formula(obstacle.node, names), _LONGEST_FORMULA, placeholder=" ...")
    return f"`{formula}` {obstacle.reason}"


def _holds(within: Within, values: Sequence[object], kv_len: int) -> bool:
    value = values[within.slot]
    return isinstance(value, int | float) and within.holds(value, kv_len)


def _condition(within: Within, names: Sequence[str]) -> str:
    name = names[within.slot]
    upper = f" <= {within.greatest:,}" if within.greatest < WIDTH[DType.I32].hi else ""
    text = f"{within.least:,} <= {name}{upper}"
    return f"{text} and kv_len <= {within.reach} * {name}" if within.reach else text
