"""Rewrite the leaves of a graph: its inputs, and the slots of its captures."""

from __future__ import annotations

from collections.abc import Mapping

from flexc.ir.build import cast, input_
from flexc.ir.expr import Expr, rebuild, with_args
from flexc.ir.ops import Input, Op


def substitute(root: Expr, table: Mapping[Input, Expr]) -> Expr:
    """`root` with the inputs in `table` replaced, all at once; replacements are cast to the input's type.

    Example: `{Input.Q_IDX: add(load(perm, q_idx), offset)}` makes a mask see reordered queries.
    """

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.INPUT and isinstance(node.attr, Input) and node.attr in table:
            return cast(table[node.attr], node.dtype)
        return with_args(node, args)

    return rebuild(root, replace)


_EXCHANGED = {
    Input.Q_IDX: Input.KV_IDX,
    Input.KV_IDX: Input.Q_IDX,
    Input.Q_LEN: Input.KV_LEN,
    Input.KV_LEN: Input.Q_LEN,
}


def transposed(root: Expr) -> Expr:
    """`root` with queries and keys exchanged: of a mask, the one whose rows are keys."""
    return substitute(root, {one: input_(other) for one, other in _EXCHANGED.items()})


def renumber(root: Expr, offset: int) -> Expr:
    """`root` with `offset` added to every capture slot, so that two mods' captures can stand in one list."""

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.SIZE and isinstance(node.attr, tuple):
            return Expr(Op.SIZE, (), (node.attr[0] + offset, node.attr[1]), node.dtype)
        if node.op in (Op.SCALAR, Op.LOAD) and isinstance(node.attr, int):
            return Expr(node.op, args, node.attr + offset, node.dtype)
        return with_args(node, args)

    return rebuild(root, replace)
