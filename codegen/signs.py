"""Which integer nodes are never negative: Triton's `//` and `%` are then Python's, and no index wraps."""

from __future__ import annotations

from flexc.ir.expr import Expr, fold
from flexc.ir.ops import Op

_CLOSED = frozenset({Op.ADD, Op.MUL, Op.FLOORDIV, Op.BIT_OR, Op.BIT_XOR, Op.SHR, Op.MIN})


def nonnegative(*roots: Expr) -> frozenset[Expr]:
    """The integer and boolean nodes under `roots` that are never negative, whatever the captures hold."""
    signs = fold(roots, _visit)
    return frozenset(node for node, known in signs.items() if known)


def _visit(node: Expr, args: tuple[bool, ...]) -> bool:
    if node.dtype.is_float:
        return False
    op = node.op
    if op is Op.CONST:
        return isinstance(node.attr, int) and node.attr >= 0
    if op in (Op.INPUT, Op.SIZE, Op.ABS) or not node.dtype.is_integer:
        return True
    if op in (Op.SCALAR, Op.LOAD):
        return False
    if op in (Op.MAX, Op.BIT_AND):
        return any(args)
    if op is Op.MOD:
        return args[1]  # the remainder takes the sign of the divisor
    if op in _CLOSED:
        return all(args)
    if op is Op.WHERE:
        return args[1] and args[2]
    if op is Op.CAST:
        return args[0] and not node.args[0].dtype.is_float
    return False
