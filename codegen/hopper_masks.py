"""Masks of a Hopper kernel whose keys are only compared with rows.

A thread holds columns at fixed distances from its first one, `first_column`. Both sides of a comparison count
from there (`kv_from`): the keys (`kv_on`) are then the same numbers in all threads, which the machine
code holds: a comparison is one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def by_ends(mask: Expr, ranges: Ranges | None) -> Expr:
    """A mask of one range as comparisons of the key with the range's ends; another as it is.

    `ranges` are the exact ones of the mask. Example: `kv_idx <= q_idx or kv_idx < n` is
    `kv_idx < max(q_idx + 1, n)`: one comparison a pair, and one that `mask_sides` can tell when to make.
    """
    if ranges is None or len(ranges.ranges) != 1 or _sides(mask):
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
    return terms[0] if len(terms) == 1 else logic(Op.AND, *terms)


def _clipped(end: Expr) -> Expr:
    """An end of a range, so near to the keys that what is taken from it leaves it an integer."""
    if is_index(end):
        return end
    return simplify(binary(Op.MIN, binary(Op.MAX, end, const(0)), _KV_LEN))


def mask_near(allowed: Expr, mask: Element, hoisting: Hoisting) -> str | None:
    """The call of a mask with comparisons counted from `kv_from`, if they are all that it does with keys."""
    rows = compared_rows(allowed)
    if rows is None:
        return None
    return mask.call(kv_idx="kv_on", **dict(_near(row, hoisting) for row in rows))


def mask_sides(allowed: Expr, masked: str | None, hoisting: Hoisting) -> tuple[Side, ...]:
    """A mask of one range as comparisons: a key is not past the range's end, and not before its first.

    Tiles of keys before `full_end` have no end of a row in them, those from `full_first` on no first key.
    `masked` is the condition of the whole mask. Empty for another mask.
    """
    sides = tuple(_side(term, hoisting) for term in _sides(allowed))
    known = all(masked is not None and side.masked in masked for side in sides)
    return sides if known and len({side.at_end for side in sides}) == len(sides) else ()


def _sides(allowed: Expr) -> tuple[Expr, ...]:
    """The comparisons of a key with a row that a mask is; empty if it is anything else."""
    terms = allowed.args if allowed.op is Op.AND else (allowed,)
    rows = compared_rows(allowed) or ()
    # What compares a key with a number is a term of the column, no side of a row.
    if any(term.op not in _SIGNS or _KV not in term.args or not {*term.args} & {*rows} for term in terms):
        return ()
    return terms


def _side(term: Expr, hoisting: Hoisting) -> Side:
    sign = _SIGNS[term.op]
    if term.args[0] is _KV:
        return Side(f"kv_on {sign} {_near(term.args[1], hoisting)[1]}", "kv_start >= full_end", at_end=True)
    return Side(f"{_near(term.args[0], hoisting)[1]} {sign} kv_on", "kv_start < full_first", at_end=False)


def _near(row: Expr, hoisting: Hoisting) -> tuple[str, str]:
    """The name of what a key is compared with, and the same counted from `kv_from`."""
    name = "q_idx" if row.op is Op.INPUT else hoisting.bound[row]
    return name, f"{name} - kv_from"
