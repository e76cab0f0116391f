"""Constructors of nodes: they promote operand types, cast, and swap greater-than forms.

Every node outside `expr.py` is made here, so that a graph is well typed by construction. A wrong operand type
raises TypeError: tracing turns it into an error at the user's own line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexc.ir.expr import Expr, topological
from flexc.ir.ops import FLOAT_INPUTS, INFO, Input, Op
from flexc.ir.types import DType, promote

_I32_MAX = 2**31 - 1


def const(value: bool | int | float, dtype: DType | None = None) -> Expr:
    """A literal. Without `dtype`: bool, i32 (i64 when it does not fit) or f32 by the Python type."""
    if dtype is None:
        if isinstance(value, bool):
            dtype = DType.BOOL
        elif isinstance(value, int):
            dtype = DType.I32 if -_I32_MAX - 1 <= value <= _I32_MAX else DType.I64
        else:
            dtype = DType.F32
    if dtype is DType.BOOL:
        value = bool(value)
    elif dtype.is_integer:
        if isinstance(value, float) and not math.isfinite(value):
            raise TypeError(f"{value} has no integer value")
        value = int(value)
    else:
        value = float(value)
    return Expr(Op.CONST, (), value, dtype)


def input_(which: Input) -> Expr:
    """One of the inputs: `score` and `grad` are f32, all others are i32."""
    return Expr(Op.INPUT, (), which, DType.F32 if which in FLOAT_INPUTS else DType.I32)


def scalar(slot: int, dtype: DType) -> Expr:
    """The captured Python number in `slot`, a run-time argument of the kernel."""
    return Expr(Op.SCALAR, (), slot, dtype)


def size(slot: int, dimension: int) -> Expr:
    """The length of a dimension of the captured tensor in `slot`, a run-time argument of the kernel."""
    return Expr(Op.SIZE, (), (slot, dimension), DType.I32)


def load(slot: int, indices: tuple[Expr, ...], dtype: DType) -> Expr:
    """An element of the captured tensor in `slot`; one integer index a dimension (none for rank 0)."""
    for index in indices:
        if not index.dtype.is_integer:
            raise TypeError(f"an index must be an integer, not {index.dtype.value}")
    return Expr(Op.LOAD, indices, slot, dtype)


def cast(x: Expr, dtype: DType) -> Expr:
    """`x` converted; to bool means `x != 0`. Literals are converted at once."""
    if x.dtype is dtype:
        return x
    if x.op is Op.CONST and not isinstance(x.attr, (Input, tuple)) and x.attr is not None:
        return const(x.attr, dtype)
    if dtype is DType.BOOL:
        return compare(Op.NE, x, const(0, x.dtype))
    return Expr(Op.CAST, (x,), None, dtype)


def unify(*args: Expr, least: DType = DType.BOOL) -> tuple[Expr, ...]:
    """The operands cast to their common type, which is at least `least`.

    A literal is weak, as a Python number is in PyTorch: it takes the type of the others when its kind allows.
    """
    strong = [a.dtype for a in args if not _is_weak(a)]
    weak = [_weak_dtype(a, promote(*strong)) if strong else a.dtype for a in args if _is_weak(a)]
    common = promote(*strong, *weak, least)
    return tuple(cast(a, common) for a in args)


def _is_weak(x: Expr) -> bool:
    return x.op is Op.CONST or x.op is Op.SCALAR


def _weak_dtype(x: Expr, other: DType) -> DType:
    if x.dtype is DType.I64 and x.op is Op.CONST and other is DType.I32:
        return DType.I64  # a literal that needs 64 bits is compared in 64 bits
    if x.dtype.is_integer and other.is_integer:
        return other if x.op is Op.CONST else promote(x.dtype, other)
    return x.dtype


def unary(op: Op, x: Expr) -> Expr:
    """NEG ABS SIGN (numbers), BIT_NOT (integers), NOT (bool), or a float function."""
    takes = INFO[op].takes
    if takes == "float":
        return Expr(op, (cast(x, DType.F32),), None, DType.F32)
    if takes == "bool":
        return Expr(op, (cast(x, DType.BOOL),), None, DType.BOOL)
    if takes == "integer" and not x.dtype.is_integer:
        raise TypeError(f"{op.value} takes an integer, not {x.dtype.value}")
    if x.dtype is DType.BOOL:
        x = cast(x, DType.I32)
    return Expr(op, (x,), None, x.dtype)


def binary(op: Op, a: Expr, b: Expr) -> Expr:
    """An arithmetic, integer or bit operation of two operands; floor division and modulo also of floats."""
    if op in (Op.FLOORDIV, Op.MOD) and (a.dtype.is_float or b.dtype.is_float):
        quotient = unary(Op.FLOOR, binary(Op.DIV, a, b))
        return quotient if op is Op.FLOORDIV else binary(Op.SUB, a, binary(Op.MUL, quotient, b))
    takes = INFO[op].takes
    if takes == "float":
        a, b = cast(a, DType.F32), cast(b, DType.F32)
    elif takes == "integer":
        if a.dtype.is_float or b.dtype.is_float:
            raise TypeError(f"{op.value} takes integers, not {a.dtype.value} and {b.dtype.value}")
        a, b = unify(a, b, least=DType.I32)
    else:
        a, b = unify(a, b, least=DType.I32)
    return Expr(op, (a, b), None, a.dtype)


def extremes(op: Op, items: Sequence[Expr]) -> Expr:
    """The least (MIN) or greatest (MAX) of floats, of which equal ones share a gradient evenly.

    Nodes of one reduction carry one number, larger than those of reductions among the items: an adjoint
    counts how many items below a node are equal to it.
    """
    inner = [n.attr for n in topological(*items) if n.op in (Op.MIN, Op.MAX) and isinstance(n.attr, int)]
    depth = 1 + max(inner, default=0)
    row = [cast(x, DType.F32) for x in items]
    while len(row) > 1:
        pairs = [Expr(op, (a, b), depth, DType.F32) for a, b in zip(row[::2], row[1::2], strict=False)]
        row = pairs + row[len(row) - len(row) % 2 :]
    return row[0]


def detach(x: Expr) -> Expr:
    """`x` as something that no gradient goes through; what never has one is itself."""
    if x.dtype is not DType.F32 or x.op in (Op.CONST, Op.SCALAR, Op.DETACH):
        return x
    return unary(Op.DETACH, x)


def compare(op: Op, a: Expr, b: Expr) -> Expr:
    """LT LE EQ NE of two operands of any type."""
    least = DType.BOOL if op in (Op.EQ, Op.NE) else DType.I32
    a, b = unify(a, b, least=least)
    return Expr(op, (a, b), None, DType.BOOL)


def logic(op: Op, a: Expr, b: Expr) -> Expr:
    """AND or OR of two booleans (numbers count as `!= 0`)."""
    return Expr(op, (cast(a, DType.BOOL), cast(b, DType.BOOL)), None, DType.BOOL)


def where(condition: Expr, x: Expr, y: Expr) -> Expr:
    """`x` where `condition` holds, else `y`."""
    x, y = unify(x, y)
    return Expr(Op.WHERE, (cast(condition, DType.BOOL), x, y), None, x.dtype)


TRUE = const(True)
FALSE = const(False)
