"""Mods that depend on the distance of query and key only: indices may count from any key.

`slopes[h] * (kv_idx - q_idx)` costs a conversion and a product for each key of a step. Counted from the first
key of the step, the part of the keys is the same in every step, and that of the rows is two numbers a thread.
Both are smaller than the indices, so nothing gets less exact.
"""

from __future__ import annotations

from flexc.ir import build
from flexc.ir.expr import Expr, inputs_of, rebuild, topological, with_args
from flexc.ir.ops import COMPARISONS, Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.types import DType

_Q, _KV = (build.cast(build.input_(which), DType.F32) for which in (Input.Q_IDX, Input.KV_IDX))


def near_form(score: Expr, *, by_head: bool = True) -> tuple[Expr, frozenset[Expr]] | None:
    """`score` with its distances split into a part of the row and one of the column, and these parts.

    Adding the same number to `q_idx` and `kv_idx` in all parts changes nothing. None if the indices as floats
    are used in another way than in a distance, or not at all. With `by_head` false, rows of a tile are of
    several heads: a head's factor of a distance differs from row to row then, and stays where it is.
    """
    nodes = topological(score)
    users = [node for node in nodes if _Q in node.args or _KV in node.args]
    if not users or any(node.op is not Op.SUB or {*node.args} != {_Q, _KV} for node in users):
        return None
    levels = place(score)
    parts: set[Expr] = {_Q, _KV}

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.MUL:
            for factor, distance in (node.args, node.args[::-1]):
                if distance in users and levels[factor] <= Placement.HEAD and (by_head or _is_shared(factor)):
                    left, right = (build.binary(Op.MUL, factor, index) for index in distance.args)
                    parts.update((left, right))
                    return build.binary(Op.SUB, left, right)
        return with_args(node, args)

    return rebuild(score, replace), frozenset(parts)


def _is_shared(factor: Expr) -> bool:
    """Whether all heads of a batch have the same."""
    return Input.H not in inputs_of(factor)


_SMALL = 2**30


def compared_rows(mask: Expr) -> tuple[Expr, ...] | None:
    """What a pair compares its key with, if it needs it for nothing else: query indices plus numbers.

    The same may be taken from both sides of these comparisons. None if a pair uses its key in another way, or
    what that is compared with.
    """
    kv_idx = build.input_(Input.KV_IDX)
    levels = place(mask)
    pairs = [node for node in topological(mask) if levels[node] is Placement.ELEMENT]
    rows: dict[Expr, None] = {}
    for node in pairs:
        if kv_idx in node.args:
            others = [arg for arg in node.args if arg is not kv_idx]
            if node.op not in COMPARISONS or len(others) != 1 or not _is_of_row(others[0]):
                return None
            rows[others[0]] = None
    used = (arg for node in pairs if kv_idx not in node.args for arg in node.args)
    return None if not rows or rows.keys() & set(used) else tuple(rows)


def _is_of_row(node: Expr) -> bool:
    """What keys may be compared with: a row's number near the keys. A number alone is the column's matter."""
    return is_index(node) and not _is_number(node)


def is_index(node: Expr) -> bool:
    """Whether a 32-bit value lies far from the limits of an integer.

    The query's index plus or minus one number at most, a length, what lies between two such, and the lesser
    or the greater of them.
    """
    if node.op in (Op.ADD, Op.SUB):
        first, second = node.args
        if node.op is Op.ADD and _is_number(first):
            first, second = second, first
        return _is_query(first) and _is_number(second)
    if node.op in (Op.MIN, Op.MAX):
        other = Op.MAX if node.op is Op.MIN else Op.MIN
        return any(
            is_index(limit) and (is_index(rest) or (rest.op is other and any(map(is_index, rest.args))))
            for limit, rest in (node.args, node.args[::-1])
        )
    return _is_query(node) or _is_number(node) or (node.op is Op.INPUT and node.attr is Input.KV_LEN)


def _is_query(node: Expr) -> bool:
    return node.op is Op.INPUT and node.attr is Input.Q_IDX and node.dtype is DType.I32


def _is_number(node: Expr) -> bool:
    """A small literal, or a captured number, which is 64-bit above 2**30."""
    if node.op is Op.CONST:
        return isinstance(node.attr, int) and abs(node.attr) <= _SMALL
    return node.op is Op.SCALAR and node.dtype is DType.I32
