"""Masks of a Hopper kernel whose keys are only compared with rows.

A thread holds columns at fixed distances from its first one, `first_column`. Both sides of a comparison count
from there (`kv_from`): the keys (`kv_on`) are then the same numbers in all threads, which the machine
code holds: a comparison is one instruction.

A kernel that keeps keys and walks the queries has the same with queries and keys exchanged: `first_row`,
`q_from` and `q_on`. What is said here of keys and rows is then true of the transposed mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexc.codegen.blocks import turned
from flexc.codegen.bounds import BY_KEYS, BY_QUERIES, Axes
from flexc.codegen.hoisting import Element, Hoisting
from flexc.codegen.nearness import compared_rows, is_index
from flexc.ir.build import binary, compare, const, input_, logic
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import Ranges
from flexc.ir.simplify import simplify
from flexc.ir.types import DType

_KV, _KV_LEN = input_(Input.KV_IDX), input_(Input.KV_LEN)
_SIGNS = {Op.LT: "<", Op.LE: "<="}


@dataclass(frozen=True, slots=True)
class Side:
    """One comparison of a mask, and the condition on `kv_start` under which it decides anything.

    `at_end`: it ends the keys of a row, and so decides in the tile of keys that is visited first.
    """

    allowed: str
    masked: str
    at_end: bool


def by_ends(mask: Expr, ranges: Ranges | None, axes: Axes = BY_QUERIES) -> Expr:
    """A mask of one range as comparisons of the key with the range's ends; another as it is.

    `ranges` are the exact ones of the mask. Example: `kv_idx <= q_idx or kv_idx < n` is
    `kv_idx < max(q_idx + 1, n)`: one comparison a pair, and one that `mask_sides` can tell when to make.
    """
    if ranges is None or len(ranges.ranges) != 1 or _sides(turned(mask, axes)):
        return mask
    (found,) = ranges.ranges
    first, end = simplify(found.first), simplify(found.end)
    if DType.I64 in (first.dtype, end.dtype):
        return mask
    terms = []
    if not (first.op is Op.CONST and isinstance(first.attr, int) and first.attr <= 0):
        terms.append(compare(Op.LE, _clipped(first), _KV))
    if end is not _KV_LEN:
        terms.append(compare(Op.LT, _KV, _clipped(end)))
    if not terms:
        return mask
    return turned(terms[0] if len(terms) == 1 else logic(Op.AND, *terms), axes)


def _clipped(end: Expr) -> Expr:
    """An end of a range, so near to the keys that what is taken from it leaves it an integer."""
    if is_index(end):
        return end
    return simplify(binary(Op.MIN, binary(Op.MAX, end, const(0)), _KV_LEN))


def has_two_ends(mask: Expr, ranges: Ranges | None) -> bool:
    """Whether a mask is two comparisons, one with each end of its range, as `mask_sides` finds them."""
    starts = [term.args[0] is _KV for term in _sides(by_ends(mask, ranges))]
    return sorted(starts) == [False, True]


def mask_near(
    allowed: Expr, mask: Element, hoisting: Hoisting, axes: Axes = BY_QUERIES, **rest: str
) -> str | None:
    """The call of a mask with comparisons counted from `kv_from`, if they are all that it does with keys.

    `rest` are other names of what else it reads.
    """
    rows = compared_rows(turned(allowed, axes))
    if rows is None:
        return None
    near = dict(_near(row, hoisting, axes) for row in rows)
    return mask.call(**{f"{axes.walked}_idx": f"{axes.walked}_on"}, **near, **rest)


def mask_sides(
    allowed: Expr, masked: str | None, hoisting: Hoisting, axes: Axes = BY_QUERIES
) -> tuple[Side, ...]:
    """A mask of one range as comparisons: a key is not past the range's end, and not before its first.

    Tiles of keys before `full_end` have no end of a row in them, those from `full_first` on no first key.
    `masked` is the condition of the whole mask. Empty for another mask.
    """
    sides = tuple(_side(term, hoisting, axes) for term in _sides(turned(allowed, axes)))
    known = all(masked is not None and side.masked in masked for side in sides)
    return sides if known and len({side.at_end for side in sides}) == len(sides) else ()


def told_sides(allowed: Expr, masked: str, hoisting: Hoisting) -> tuple[Side, ...]:
    """`mask_sides` of a kernel that keeps keys: of each, how its loading warp says that it decides anything.

    It adds 1 to the start of a tile of queries where the first side does, and 2 where the other does.
    """
    sides = mask_sides(allowed, masked, hoisting, BY_KEYS)
    both = len(sides) == 2
    return tuple(replace(s, masked=f"(start & {2 if both and s.at_end else 1}) != 0") for s in sides)


def _sides(allowed: Expr) -> tuple[Expr, ...]:
    """The comparisons of a key with a row that a mask is; empty if it is anything else."""
    terms = allowed.args if allowed.op is Op.AND else (allowed,)
    rows = compared_rows(allowed) or ()
    # What compares a key with a number is a term of the column, no side of a row.
    if any(term.op not in _SIGNS or _KV not in term.args or not {*term.args} & {*rows} for term in terms):
        return ()
    return terms


def _side(term: Expr, hoisting: Hoisting, axes: Axes) -> Side:
    sign, on, start = _SIGNS[term.op], f"{axes.walked}_on", f"{axes.walked}_start"
    if term.args[0] is _KV:
        near = _near(term.args[1], hoisting, axes)[1]
        return Side(f"{on} {sign} {near}", f"{start} >= full_end", at_end=True)
    near = _near(term.args[0], hoisting, axes)[1]
    return Side(f"{near} {sign} {on}", f"{start} < full_first", at_end=False)


def _near(row: Expr, hoisting: Hoisting, axes: Axes) -> tuple[str, str]:
    """The name of what a key is compared with, and the same counted from `kv_from`."""
    name = f"{axes.kept}_idx" if row.op is Op.INPUT else hoisting.bound[turned(row, axes)]
    return name, f"{name} - {axes.walked}_from"
