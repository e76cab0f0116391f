"""Make a graph smaller without changing what it means: exact rules, one table entry an op, to a fixpoint.

Accepted: constant folding, identities, and the rules of `rewrite_arithmetic` and `rewrite_logic`. Rejected:
what holds only without overflow (`x + 1 < 3` to `x < 2`), only without NaN (`x - x` of floats), or only to a
few places (`x * c1 * c2` of floats).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from flexc.ir.build import const
from flexc.ir.evaluate import TABLE, Env
from flexc.ir.expr import Expr, rebuild, with_args
from flexc.ir.ops import COMMUTATIVE, Op
from flexc.ir.rewrite_arithmetic import ARITHMETIC_RULES
from flexc.ir.rewrite_logic import LOGIC_RULES
from flexc.ir.types import DType

Rule = Callable[[Expr], Expr | None]

# Every op that has rules beyond constant folding; a rule returns None where it does not apply.
RULES: dict[Op, Rule] = {**ARITHMETIC_RULES, **LOGIC_RULES}

_FOLDING = Env({}, (), np, np.float64)
_F32 = np.finfo(np.float32)
_INTEGER_BOUND = {DType.I32: 2**31, DType.I64: 2**63}


def simplify(root: Expr) -> Expr:
    """`root` rewritten until no rule applies. Idempotent; keeps the root's type.

    Example: `where(True, x * 1 + 0, y)` becomes `x`.
    """
    while True:
        smaller = rebuild(root, _replace)
        if smaller is root:
            return root
        root = smaller


def _replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
    node = with_args(node, args)
    while True:
        simpler = _constant(node) or _constant_last(node)
        if simpler is None and node.op in RULES:
            simpler = RULES[node.op](node)
        if simpler is None:
            return node
        node = simpler


def _constant_last(node: Expr) -> Expr | None:
    """Literals stand on the right of what commutes, so that rules look there only."""
    if node.op not in COMMUTATIVE or node.args[0].op is not Op.CONST or node.args[1].op is Op.CONST:
        return None
    return with_args(node, (node.args[1], node.args[0]))


def _constant(node: Expr) -> Expr | None:
    """The literal that `node` is equal to, where all its operands are literals."""
    if not node.args or node.op is Op.LOAD or any(arg.op is not Op.CONST for arg in node.args):
        return None
    if node.op in (Op.FLOORDIV, Op.MOD) and node.args[1].attr == 0:
        return None
    if node.op in (Op.SHL, Op.SHR) and not 0 <= _number(node.args[1]) < 32:
        return None
    if node.op is Op.CAST and node.dtype.is_integer and not _has_integer(_number(node.args[0]), node.dtype):
        return None
    with np.errstate(all="ignore"):
        operands = (TABLE[Op.CONST](_FOLDING, arg) for arg in node.args)
        value = TABLE[node.op](_FOLDING, node, *operands).item()
    if isinstance(value, float) and node.op is Op.CAST:
        value = float(np.float32(value))  # of an integer of more than 24 bits less is left
    if isinstance(value, float) and not _fits_f32(value):
        return None
    return const(value, node.dtype)


def _number(literal: Expr) -> float:
    assert isinstance(literal.attr, bool | int | float)
    return literal.attr


def _has_integer(value: float, dtype: DType) -> bool:
    bound = _INTEGER_BOUND[dtype]
    return math.isfinite(value) and -bound <= value < bound


def _fits_f32(value: float) -> bool:
    """Whether 32 bits hold it; otherwise folding in 64 bits would skip an overflow or underflow."""
    return value == 0 or not math.isfinite(value) or float(_F32.tiny) <= abs(value) <= float(_F32.max)
