"""The operations of the expression language, and what they mean.

Semantics, the same on every backend:

- A graph is pure. A node may be evaluated more than once, hoisted, or evaluated where the mask is false.
- `b, h, q_idx, kv_idx` are 32-bit integers; `h` is the query head. `score` is `q . k * scale` in fp32.
- Integers wrap at their width. `FLOORDIV` and `MOD` floor, as in Python: `-1 // 2 == -1`, `-1 % 2 == 1`.
  The result of an integer division by zero is unspecified, but it does not fault.
- `LOAD(slot, i, j, ...)` reads a captured tensor at full rank. A negative index counts from the end. An index
  out of range does not fault; its value is unspecified and must be masked by the user's function.
- `DIV` is float division. `POW` is float; a negative base needs an exponent that is an integer.
- `SHR` is arithmetic (it keeps the sign), as in Python. Shifts outside 0 to the width are unspecified.
- Floats follow IEEE; `MIN` and `MAX` of a NaN are unspecified. `CAST` float -> int truncates toward zero.
- Comparisons of floats with NaN are false, except `NE`.
- `DETACH` is its operand, through which no gradient goes.
- Rewrites are exact on integers and booleans; on floats they change at most the last place.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """One operation. `INFO[op]` has its facts."""

    # Leaves. Their `attr`: a Python value, an Input, a slot number, (slot, dimension), a slot number.
    CONST = "const"
    INPUT = "input"
    SCALAR = "scalar"
    SIZE = "size"
    LOAD = "load"
    # Arithmetic on integers and floats.
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    NEG = "neg"
    ABS = "abs"
    MIN = "min"
    MAX = "max"
    SIGN = "sign"
    # Integers.
    FLOORDIV = "floordiv"
    MOD = "mod"
    BIT_AND = "bit_and"
    BIT_OR = "bit_or"
    BIT_XOR = "bit_xor"
    BIT_NOT = "bit_not"
    SHL = "shl"
    SHR = "shr"
    # Floats.
    DIV = "div"
    POW = "pow"
    EXP = "exp"
    EXP2 = "exp2"
    LOG = "log"
    LOG2 = "log2"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    SIN = "sin"
    COS = "cos"
    ATAN = "atan"
    ERF = "erf"
    FLOOR = "floor"
    # Comparisons. Greater-than forms are swapped when they are built.
    LT = "lt"
    LE = "le"
    EQ = "eq"
    NE = "ne"
    # Logic on booleans.
    AND = "and"
    OR = "or"
    NOT = "not"
    # Choice and conversion.
    WHERE = "where"
    CAST = "cast"
    # What it is given, and nothing to an adjoint.
    DETACH = "detach"


class Input(Enum):
    """What a mod is called with, and what every backend knows besides."""

    B = "b"
    H = "h"
    Q_IDX = "q_idx"
    KV_IDX = "kv_idx"
    SCORE = "score"
    Q_LEN = "q_len"
    KV_LEN = "kv_len"
    GRAD = "grad"
    """In adjoints only: the gradient of the modified score."""


FLOAT_INPUTS = frozenset({Input.SCORE, Input.GRAD})


class OpInfo(NamedTuple):
    """Facts of an op: number of operands (None: any), and which operand types it takes."""

    arity: int | None
    takes: str  # "leaf" | "number" | "integer" | "float" | "bool" | "any"


_LEAVES = {Op.CONST: 0, Op.INPUT: 0, Op.SCALAR: 0, Op.SIZE: 0, Op.LOAD: None}
_NUMBER = {Op.ADD: 2, Op.SUB: 2, Op.MUL: 2, Op.NEG: 1, Op.ABS: 1, Op.MIN: 2, Op.MAX: 2, Op.SIGN: 1}
_INTEGER = {
    Op.FLOORDIV: 2,
    Op.MOD: 2,
    Op.BIT_AND: 2,
    Op.BIT_OR: 2,
    Op.BIT_XOR: 2,
    Op.BIT_NOT: 1,
    Op.SHL: 2,
    Op.SHR: 2,
}
_FLOAT = {
    Op.DIV: 2,
    Op.POW: 2,
    Op.EXP: 1,
    Op.EXP2: 1,
    Op.LOG: 1,
    Op.LOG2: 1,
    Op.SQRT: 1,
    Op.RSQRT: 1,
    Op.TANH: 1,
    Op.SIGMOID: 1,
    Op.SIN: 1,
    Op.COS: 1,
    Op.ATAN: 1,
    Op.ERF: 1,
    Op.FLOOR: 1,
    Op.DETACH: 1,
}
COMPARISONS = frozenset({Op.LT, Op.LE, Op.EQ, Op.NE})
COMMUTATIVE = frozenset(
    {Op.ADD, Op.MUL, Op.MIN, Op.MAX, Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.EQ, Op.NE, Op.AND, Op.OR}
)

INFO: dict[Op, OpInfo] = {
    **{op: OpInfo(arity, "leaf") for op, arity in _LEAVES.items()},
    **{op: OpInfo(arity, "number") for op, arity in _NUMBER.items()},
    **{op: OpInfo(arity, "integer") for op, arity in _INTEGER.items()},
    **{op: OpInfo(arity, "float") for op, arity in _FLOAT.items()},
    **{op: OpInfo(2, "any") for op in (Op.EQ, Op.NE)},
    **{op: OpInfo(2, "number") for op in (Op.LT, Op.LE)},
    Op.AND: OpInfo(2, "bool"),
    Op.OR: OpInfo(2, "bool"),
    Op.NOT: OpInfo(1, "bool"),
    Op.WHERE: OpInfo(3, "any"),
    Op.CAST: OpInfo(1, "any"),
}
