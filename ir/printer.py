"""Graphs as text: a stable, injective form for keys and goldens, and a formula for people."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

from flexc.errors import InternalError
from flexc.ir.expr import Expr, fold, inputs_of, topological
from flexc.ir.ops import COMPARISONS, FLOAT_INPUTS, INFO, Input, Op
from flexc.ir.types import DType

# How tightly each form binds, loosest first.
_OR, _AND, _NOT, _COMPARE, _BIT_OR, _BIT_XOR, _BIT_AND = range(7)
_SHIFT, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(7, 13)
_INFIX = {
    Op.OR: ("or", _OR),
    Op.AND: ("and", _AND),
    Op.LT: ("<", _COMPARE),
    Op.LE: ("<=", _COMPARE),
    Op.EQ: ("==", _COMPARE),
    Op.NE: ("!=", _COMPARE),
    Op.BIT_OR: ("|", _BIT_OR),
    Op.BIT_XOR: ("^", _BIT_XOR),
    Op.BIT_AND: ("&", _BIT_AND),
    Op.SHL: ("<<", _SHIFT),
    Op.SHR: (">>", _SHIFT),
    Op.ADD: ("+", _SUM),
    Op.SUB: ("-", _SUM),
    Op.MUL: ("*", _PRODUCT),
    Op.DIV: ("/", _PRODUCT),
    Op.FLOORDIV: ("//", _PRODUCT),
    Op.MOD: ("%", _PRODUCT),
    Op.POW: ("**", _POWER),
}
_PREFIX = {Op.NOT: ("not ", _NOT), Op.NEG: ("-", _SIGN), Op.BIT_NOT: ("~", _SIGN)}
_FLIPPED = {"<": ">", "<=": ">=", "==": "==", "!=": "!="}


def to_text(*roots: Expr) -> str:
    """One line a shared node, `%0 = sub(q_idx, kv_idx)`, then one line a root.

    Injective: two lists of roots have the same text only if they are the same expressions. A type is written
    (`3:i64`) where the op and its operands do not imply it.
    """
    order = topological(*roots)
    uses = Counter(arg for node in order for arg in node.args)
    uses.update(roots)
    lines: list[str] = []

    def visit(node: Expr, args: tuple[str, ...]) -> str:
        text = _node_text(node, args)
        if uses[node] < 2 or not node.args:
            return text
        lines.append(f"%{len(lines)} = {text}")
        return f"%{len(lines) - 1}"

    texts = fold(roots, visit)
    return "\n".join([*lines, *(texts[root] for root in roots)])


def _node_text(node: Expr, args: tuple[str, ...]) -> str:
    suffix = "" if node.dtype is _implied_dtype(node) else f":{node.dtype.value}"
    operands = f"({', '.join(args)})" if args else ""
    if node.op is Op.CONST and not isinstance(node.attr, (Input, tuple)):
        name = repr(node.attr)
    elif node.op is Op.INPUT and isinstance(node.attr, Input):
        name = node.attr.value
    elif isinstance(node.attr, tuple):
        name = f"{node.op.value}{node.attr[0]}.{node.attr[1]}"
    else:
        name = node.op.value if node.attr is None else f"{node.op.value}{node.attr!r}"
    return name + operands + suffix


def _implied_dtype(node: Expr) -> DType | None:
    """The type that a reader expects without being told; None where there is none."""
    if node.op is Op.CONST:
        return {bool: DType.BOOL, int: DType.I32, float: DType.F32}.get(type(node.attr))
    if node.op is Op.INPUT:
        return DType.F32 if node.attr in FLOAT_INPUTS else DType.I32
    if node.op is Op.SIZE:
        return DType.I32
    if node.op in COMPARISONS or INFO[node.op].takes == "bool":
        return DType.BOOL
    if INFO[node.op].takes == "float":
        return DType.F32
    if node.op in (Op.CAST, Op.LOAD, Op.SCALAR) or not node.args:
        return None
    return node.args[-1].dtype


def digest(*parts: object) -> str:
    """The hex SHA-256 of a stable text of `parts`: the same in every process and on every machine.

    Takes expressions, enums, dataclasses, numbers, strings, bytes, None, and tuples, lists, sets and mappings
    of these. Raises InternalError on anything else, whose text might hold an address.
    """
    return hashlib.sha256(_stable(parts).encode()).hexdigest()


def _stable(part: object) -> str:
    if isinstance(part, Expr):
        return f"Expr{to_text(part)!r}"
    if isinstance(part, Enum):
        return f"{type(part).__name__}.{part.name}"
    if part is None or isinstance(part, bool | int | str | bytes):
        return repr(part)
    if isinstance(part, float):
        return part.hex()
    if isinstance(part, Mapping):
        items = sorted((_stable(key), _stable(value)) for key, value in part.items())
        return "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"
    if is_dataclass(part) and not isinstance(part, type):
        inner = ", ".join(f"{f.name}={_stable(getattr(part, f.name))}" for f in fields(part))
        return f"{type(part).__name__}({inner})"
    if isinstance(part, tuple | list):
        return f"{type(part).__name__}({', '.join(map(_stable, part))})"
    if isinstance(part, set | frozenset):
        return f"set({', '.join(sorted(map(_stable, part)))})"
    raise InternalError(f"digest: {type(part).__name__} has no stable text")


def to_formula(root: Expr, names: Sequence[str]) -> str:
    """`root` as mathematics in Python's notation, with the captures called by `names` (by slot).

    For people, not injective: conversions between number types are left out, and comparisons turned so that
    what varies most stands on the left: `q_idx >= kv_idx and q_idx - kv_idx < window`.
    """

    def visit(node: Expr, args: tuple[tuple[str, int], ...]) -> tuple[str, int]:
        if node.op in _INFIX:
            return _infix(node, args)
        if node.op in _PREFIX:
            sign, level = _PREFIX[node.op]
            return sign + _wrapped(args[0], level), level
        if node.op is Op.CAST:
            return _cast_formula(node, args[0])
        if not node.args:
            return _leaf_formula(node, names)
        texts = ", ".join(text for text, _ in args)
        if node.op is Op.LOAD and isinstance(node.attr, int):
            return f"{_wrapped(_named(names[node.attr]), _ATOM)}[{texts}]", _ATOM
        return f"{node.op.value}({texts})", _ATOM

    return fold([root], visit)[root][0]


def _wrapped(part: tuple[str, int], level: int) -> str:
    text, own = part
    return text if own >= level else f"({text})"


def _infix(node: Expr, args: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    sign, level = _INFIX[node.op]
    left, right = args
    if level == _COMPARE:
        if _variation(node.args[0]) < _variation(node.args[1]):
            left, right, sign = right, left, _FLIPPED[sign]
        return f"{_wrapped(left, level + 1)} {sign} {_wrapped(right, level + 1)}", level
    if node.op is Op.POW:
        return f"{_wrapped(left, level + 1)} ** {_wrapped(right, level)}", level
    tight = level + (0 if node.op in (Op.ADD, Op.MUL, Op.AND, Op.OR) else 1)
    return f"{_wrapped(left, level)} {sign} {_wrapped(right, tight)}", level


def _variation(node: Expr) -> int:
    """How much of the grid a side reads: the side that reads more is written first."""
    weight = {Input.GRAD: 16, Input.SCORE: 8, Input.Q_IDX: 4, Input.KV_IDX: 2}
    return sum(weight.get(which, 1) for which in inputs_of(node))


def _cast_formula(node: Expr, operand: tuple[str, int]) -> tuple[str, int]:
    source = node.args[0].dtype
    narrows = source is DType.BOOL or (source is DType.F32 and node.dtype.is_integer)
    if not narrows:
        return operand
    return f"{'float' if node.dtype.is_float else 'int'}({operand[0]})", _ATOM


def _leaf_formula(node: Expr, names: Sequence[str]) -> tuple[str, int]:
    if isinstance(node.attr, Input):
        return node.attr.value, _ATOM
    if isinstance(node.attr, tuple):
        return f"{_wrapped(_named(names[node.attr[0]]), _ATOM)}.shape[{node.attr[1]}]", _ATOM
    if node.op is Op.CONST:
        text = repr(node.attr)
        return text, _SIGN if text.startswith("-") else _ATOM
    return _named(names[int(node.attr or 0)])


def _named(name: str) -> tuple[str, int]:
    """What a captured value is called; a number computed before the call is called by its formula."""
    if " " in name:
        return name, _SUM
    return name, _SIGN if name.startswith("-") else _ATOM
