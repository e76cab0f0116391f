"""Which integer nodes are never negative: Triton's `//` and `%` are then Python's, and no index wraps.

Overflow counts: a node is only called non-negative if its width can hold it. Lengths are below 2**30.
"""

from __future__ import annotations

from typing import NamedTuple

from flexc.ir.expr import Expr, fold
from flexc.ir.ops import Op
from flexc.ir.types import DType

_INDEX_BITS = 30
_UNKNOWN = 64


class _Range(NamedTuple):
    """`abs(x) < 2**bits`; 64 bits stand for anything."""

    nonnegative: bool
    bits: int


def nonnegative(*roots: Expr) -> frozenset[Expr]:
    """The integer and boolean nodes under `roots` that are never negative, whatever the captures hold."""
    return frozenset(node for node, found in fold(roots, _visit).items() if found.nonnegative)


def _visit(node: Expr, args: tuple[_Range, ...]) -> _Range:
    if node.dtype.is_float:
        return _Range(False, _UNKNOWN)
    if not node.dtype.is_integer:
        return _Range(True, 1)
    found = _range(node, args)
    holds = found.bits <= (31 if node.dtype is DType.I32 else 62)
    return found if holds else _Range(False, _UNKNOWN)


def _range(node: Expr, args: tuple[_Range, ...]) -> _Range:
    op, bits = node.op, [arg.bits for arg in args]
    every = all(arg.nonnegative for arg in args)
    if op is Op.CONST:
        value = int(node.attr) if isinstance(node.attr, int) else 0
        return _Range(value >= 0, value.bit_length())
    if op in (Op.INPUT, Op.SIZE):
        return _Range(True, _INDEX_BITS)
    if op is Op.ABS:
        return _Range(True, bits[0])
    if op is Op.NEG:
        return _Range(False, bits[0])
    if op in (Op.ADD, Op.SUB):
        return _Range(every and op is Op.ADD, max(bits) + 1)
    if op is Op.MUL:
        return _Range(every, sum(bits))
    if op in (Op.FLOORDIV, Op.SHR):
        return _Range(every, bits[0])
    if op is Op.MOD:
        return _Range(args[1].nonnegative, bits[1])  # the remainder takes the sign of the divisor
    if op in (Op.BIT_OR, Op.BIT_XOR, Op.MIN):
        return _Range(every, max(bits))
    if op is Op.BIT_AND:
        known = [arg.bits for arg in args if arg.nonnegative]
        return _Range(bool(known), min(known, default=_UNKNOWN))
    if op is Op.MAX:
        widest = 31 if node.dtype is DType.I32 else 62
        return _Range(any(arg.nonnegative for arg in args), min(max(bits), widest))
    if op is Op.WHERE:
        return _Range(args[1].nonnegative and args[2].nonnegative, max(bits[1:]))
    if op is Op.CAST and not node.args[0].dtype.is_float:
        return args[0]
    return _Range(False, _UNKNOWN)
