"""Put the values of a call into a graph, so that analyses see numbers instead of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexc.ir.build import const
from flexc.ir.expr import Expr, rebuild, with_args
from flexc.ir.ops import Input, Op
from flexc.ir.simplify import simplify


def bind(root: Expr, values: Sequence[Any], *, q_len: int, kv_len: int) -> Expr:
    """`root`, simplified, with captured numbers, 0-dim tensors, sizes and lengths as literals.

    `values` are the captures by slot; only tensors of one dimension or more are still read by the result.
    """
    lengths = {Input.Q_LEN: q_len, Input.KV_LEN: kv_len}

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.SCALAR and isinstance(node.attr, int):
            return const(_number(values[node.attr]), node.dtype)
        if node.op is Op.LOAD and not args and isinstance(node.attr, int):
            return const(_number(values[node.attr]), node.dtype)
        if node.op is Op.SIZE and isinstance(node.attr, tuple):
            return const(int(values[node.attr[0]].shape[node.attr[1]]), node.dtype)
        if node.op is Op.INPUT and isinstance(node.attr, Input) and node.attr in lengths:
            return const(lengths[node.attr], node.dtype)
        return with_args(node, args)

    return simplify(rebuild(root, replace))


def _number(value: Any) -> bool | int | float:
    number = value if isinstance(value, bool | int | float) else value.item()
    assert isinstance(number, bool | int | float)
    return number
