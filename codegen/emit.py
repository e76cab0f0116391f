"""Graphs as Triton statements: one table of expressions, one writer that names what is used twice.

Values keep their natural rank: what depends on the row only is (BLOCK_Q, 1), on the column (1, BLOCK_KV),
on the head a scalar; Triton broadcasts where they meet.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flexc.codegen.signs import nonnegative
from flexc.errors import InternalError
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.spec import Captured
from flexc.ir.types import DType, Storage

LINE_LENGTH = 110
_INLINE = 64  # a longer operand gets a name of its own
_TOGETHER = 72  # and so do operands that are longer together

# How tightly Python binds each form: loosest first.
_COMPARE, _OR, _XOR, _AND, _SHIFT, _SUM, _PRODUCT, _UNARY, _ATOM = range(9)

_INFIX: dict[Op, tuple[str, int]] = {
    Op.ADD: ("+", _SUM),
    Op.SUB: ("-", _SUM),
    Op.MUL: ("*", _PRODUCT),
    Op.DIV: ("/", _PRODUCT),
    Op.BIT_AND: ("&", _AND),
    Op.BIT_OR: ("|", _OR),
    Op.BIT_XOR: ("^", _XOR),
    Op.SHL: ("<<", _SHIFT),
    Op.SHR: (">>", _SHIFT),
    Op.LT: ("<", _COMPARE),
    Op.LE: ("<=", _COMPARE),
    Op.EQ: ("==", _COMPARE),
    Op.NE: ("!=", _COMPARE),
    Op.AND: ("&", _AND),
    Op.OR: ("|", _OR),
}
_CALL: dict[Op, str] = {
    Op.ABS: "tl.abs",
    Op.MIN: "tl.minimum",
    Op.MAX: "tl.maximum",
    Op.EXP: "tl.exp",
    Op.EXP2: "tl.exp2",
    Op.LOG: "tl.log",
    Op.LOG2: "tl.log2",
    Op.SQRT: "tl.sqrt",
    Op.RSQRT: "tl.rsqrt",
    Op.SIGMOID: "tl.sigmoid",
    Op.ERF: "tl.erf",
    Op.FLOOR: "tl.floor",
    Op.WHERE: "tl.where",
}
# Triton's own forms of these are off by a place or two.
_EXACT: dict[Op, str] = {Op.DIV: "tl.div_rn", Op.SQRT: "tl.sqrt_rn"}
_PREFIX: dict[Op, str] = {Op.NEG: "-", Op.NOT: "~", Op.BIT_NOT: "~"}
# Ops that Triton has no expression for: a function of the generated file does them (templates/_math.jinja).
HELPERS: dict[Op, str] = {
    Op.FLOORDIV: "floor_div",
    Op.MOD: "floor_mod",
    Op.SIGN: "sign",
    Op.TANH: "tanh",
    Op.SIN: "sine",
    Op.COS: "cosine",
    Op.ATAN: "arctan",
    Op.POW: "power",
}
_LEAVES = frozenset({Op.CONST, Op.INPUT, Op.SCALAR, Op.SIZE, Op.LOAD, Op.CAST, Op.DETACH})


def emits(op: Op) -> bool:
    """Whether `op` has a Triton form; a test asks it of every op."""
    return any(op in table for table in (_INFIX, _CALL, _PREFIX, HELPERS, _LEAVES))


_TYPE = {DType.BOOL: "tl.int1", DType.I32: "tl.int32", DType.I64: "tl.int64", DType.F32: "tl.float32"}


@dataclass(slots=True)
class Block:
    """Statements, and the texts of their results; `helpers`, `arguments` and `inputs` are what they use."""

    statements: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)
    inputs: set[Input] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a graph is emitted into: the spec, the captures' names, and nodes that already have names.

    `taken` are the names in use, to which new ones are added; `exact` are nodes to be rounded correctly.
    """

    spec: Captured
    names: tuple[str, ...]
    bound: Mapping[Expr, str]
    taken: set[str]
    exact: frozenset[Expr] = frozenset()


def fresh_name(taken: set[str], stem: str) -> str:
    """`stem`, or with a number behind it, so that it is not in `taken`; now it is."""
    name, n = stem, 1
    while name in taken:
        n += 1
        name = f"{stem}_{n}"
    taken.add(name)
    return name


def emit(scope: Scope, roots: Sequence[Expr], results: Sequence[str | None]) -> Block:
    """Statements that compute `roots`. A result name of None leaves that root as an expression."""
    writer = _Writer(scope, roots, {r: name for r, name in zip(roots, results, strict=True) if name})
    for root, name in zip(roots, results, strict=True):
        text, _ = writer.text(root)
        if name is not None and text != name:
            writer.block.statements.append(f"{name} = {text}")
            text = name
        writer.block.results.append(text)
    return writer.block


class _Writer:
    """Writes one block. `known` holds the text and the binding strength of the nodes done so far."""

    def __init__(self, scope: Scope, roots: Sequence[Expr], wanted: Mapping[Expr, str]) -> None:
        self.scope = scope
        self.wanted = wanted  # the names of results
        self.block = Block()
        self.known: dict[Expr, tuple[str, int]] = {node: (name, _ATOM) for node, name in scope.bound.items()}
        self.placement = place(*roots)
        self.nonnegative = nonnegative(*roots)
        order = topological(*roots)
        self.uses = Counter(arg for node in order for arg in node.args)
        self.uses.update(roots)
        self.taken = scope.taken
        self.roots = set(roots)

    def text(self, root: Expr) -> tuple[str, int]:
        """The text of `root`, with statements before it for whatever needs a name."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.known:
                stack.pop()
                continue
            waiting = [arg for arg in node.args if arg not in self.known]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            self._name_long_operands(node)
            self.known[node] = self._named(node, *self._write(node))
        return self.known[root]

    def _name_long_operands(self, node: Expr) -> None:
        """Give names to operands, longest first, until they fit on a line together."""
        operands = sorted(dict.fromkeys(node.args), key=lambda arg: -len(self.known[arg][0]))
        for arg in operands:
            text = self.known[arg][0]
            if sum(len(self.known[a][0]) for a in node.args) <= _TOGETHER or text.isidentifier():
                return
            self.known[arg] = self._name(arg, text)

    def _named(self, node: Expr, text: str, strength: int) -> tuple[str, int]:
        if node in self.wanted:
            return self._assigned(self.wanted[node], text), _ATOM
        single = self.uses[node] < 2 or (node in self.roots)
        if (strength == _ATOM and not node.args) or (single and len(text) <= _INLINE):
            return text, strength
        return self._name(node, text)

    def _name(self, node: Expr, text: str) -> tuple[str, int]:
        stem = "mask" if node.dtype is DType.BOOL else "index" if node.dtype.is_integer else "value"
        return self._assigned(self._fresh(stem), text), _ATOM

    def _assigned(self, name: str, text: str) -> str:
        self.block.statements.append(f"{name} = {text}")
        return name

    def _chain(self, symbol: str, terms: Sequence[str], stem: str) -> str:
        """`terms` joined by an operator, in as many statements as the line length wants."""
        total = terms[0]
        for term in terms[1:]:
            if len(total) + len(term) > _TOGETHER:
                alone = (
                    total.removeprefix("(").removesuffix(")")
                    if symbol == "&" and total is terms[0]
                    else total
                )
                total = self._assigned(self._fresh(stem), alone)
            total = f"{total} {symbol} {term}"
        return total

    def _fresh(self, stem: str) -> str:
        return fresh_name(self.taken, stem)

    def _operand(self, node: Expr, least: int) -> str:
        text, strength = self.known[node]
        return text if strength >= least else f"({text})"

    def _write(self, node: Expr) -> tuple[str, int]:
        special = _SPECIAL.get(node.op)
        if special is not None:
            return special(self, node)
        if node.op in _EXACT and node in self.scope.exact:
            return f"{_EXACT[node.op]}({', '.join(self.known[arg][0] for arg in node.args)})", _ATOM
        if node.op in _INFIX:
            return self._infix(node)
        if node.op in _PREFIX:
            return f"{_PREFIX[node.op]}{self._operand(node.args[0], _UNARY)}", _UNARY
        name = _CALL.get(node.op) or HELPERS.get(node.op)
        if name is None:
            raise InternalError(f"emit: no Triton form for {node.op}")
        if node.op in HELPERS:
            self.block.helpers.add(name)
        return f"{name}({', '.join(self.known[arg][0] for arg in node.args)})", _ATOM

    def _infix(self, node: Expr) -> tuple[str, int]:
        symbol, strength = _INFIX[node.op]
        a, b = node.args
        if node.op in (Op.EQ, Op.NE) and a.dtype is DType.BOOL:
            symbol, strength = ("^", _XOR)
            text = f"{self._operand(a, _XOR)} ^ {self._operand(b, _AND)}"
            return (text, _XOR) if node.op is Op.NE else (f"~({text})", _UNARY)
        left = self._operand(a, strength + 1 if strength == _COMPARE else strength)
        return f"{left} {symbol} {self._operand(b, strength + 1)}", strength

    # Leaves and ops with a form of their own.

    def _const(self, node: Expr) -> tuple[str, int]:
        value = node.attr
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")', _ATOM
        negative = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.copysign(1, value) < 0
        )
        return repr(value), _UNARY if negative else _ATOM

    def _input(self, node: Expr) -> tuple[str, int]:
        if not isinstance(node.attr, Input):
            raise InternalError(f"emit: an INPUT carries {node.attr!r}")
        self.block.inputs.add(node.attr)
        return node.attr.value, _ATOM

    def _scalar(self, node: Expr) -> tuple[str, int]:
        slot = node.attr
        if not isinstance(slot, int):
            raise InternalError(f"emit: a SCALAR carries {slot!r}")
        name = self._argument(self.scope.names[slot])
        return (f"{name} != 0", _COMPARE) if node.dtype is DType.BOOL else (name, _ATOM)

    def _size(self, node: Expr) -> tuple[str, int]:
        if not isinstance(node.attr, tuple):
            raise InternalError(f"emit: a SIZE carries {node.attr!r}")
        slot, dimension = node.attr
        return self._argument(f"{self.scope.names[slot]}_size_{dimension}"), _ATOM

    def _argument(self, name: str) -> str:
        self.block.arguments.add(name)
        return name

    def _cast(self, node: Expr) -> tuple[str, int]:
        operand = self._operand(node.args[0], _ATOM)
        return f"{operand}.to({_TYPE[node.dtype]})", _ATOM

    def _floordiv(self, node: Expr) -> tuple[str, int]:
        a, b = node.args
        power = _power_of_two(b)
        if power is not None:
            return f"{self._operand(a, _SHIFT)} >> {power}", _SHIFT
        if a in self.nonnegative and b in self.nonnegative:
            return f"{self._operand(a, _PRODUCT)} // {self._operand(b, _UNARY)}", _PRODUCT
        self.block.helpers.add("floor_div")
        return f"floor_div({self.known[a][0]}, {self.known[b][0]})", _ATOM

    def _mod(self, node: Expr) -> tuple[str, int]:
        a, b = node.args
        power = _power_of_two(b)
        if power is not None:
            return f"{self._operand(a, _AND)} & {(1 << power) - 1}", _AND
        if a in self.nonnegative and b in self.nonnegative:
            return f"{self._operand(a, _PRODUCT)} % {self._operand(b, _UNARY)}", _PRODUCT
        self.block.helpers.add("floor_mod")
        return f"floor_mod({self.known[a][0]}, {self.known[b][0]})", _ATOM

    def _load(self, node: Expr) -> tuple[str, int]:
        slot = node.attr
        if not isinstance(slot, int):
            raise InternalError(f"emit: a LOAD carries {slot!r}")
        name = self.scope.names[slot]
        pointer, guard = self._address(node, slot)
        if len(guard) == 1:
            guard = [guard[0].removeprefix("(").removesuffix(")")]
        mask = f", mask={self._chain('&', guard, f'{name}_inside')}, other=0" if guard else ""
        if len(pointer) + len(mask) > _TOGETHER and not pointer.isidentifier():
            pointer = self._assigned(self._fresh(f"{name}_at"), pointer)
        if len(pointer) + len(mask) > _TOGETHER + len(", mask=, other=0"):
            inside = mask.removeprefix(", mask=").removesuffix(", other=0")
            mask = f", mask={self._assigned(self._fresh(f'{name}_inside'), inside)}, other=0"
        return self._converted(f"tl.load({pointer}{mask})", self.scope.spec.captures[slot].storage)

    def _address(self, node: Expr, slot: int) -> tuple[str, list[str]]:
        """The pointer, and the conditions under which it lies inside the tensor."""
        name, spec = self.scope.names[slot], self.scope.spec
        terms: list[tuple[Placement, str]] = []
        guard: list[str] = []
        last = len(node.args) - 1
        for dimension, index in enumerate(node.args):
            text, strength = self.known[index]
            if strength != _ATOM:
                index_name = self._fresh("index")
                self.block.statements.append(f"{index_name} = {text}")
                self.known[index] = (text := index_name, _ATOM)
            length = self._argument(f"{name}_size_{dimension}")
            if index not in self.nonnegative:
                wrapped = self._fresh("index")
                self.block.statements.append(f"{wrapped} = tl.where({text} < 0, {text} + {length}, {text})")
                text = wrapped
                guard.append(f"({text} >= 0)")
            guard.append(f"({text} < {length})")
            if dimension == last and slot in spec.unit_stride:
                terms.append((self.placement[index], text))
            else:
                stride = self._argument(f"{name}_stride_{dimension}")
                terms.append((self.placement[index], f"{text} * {stride}"))
        # Scalars first, then rows, then columns: each sum has the lowest rank that it can have.
        terms.sort(key=lambda term: term[0].value)
        parts = [self._argument(f"{name}_ptr"), *(text for _, text in terms)]
        return self._chain("+", parts, f"{name}_at"), guard

    def _converted(self, call: str, storage: Storage) -> tuple[str, int]:
        if storage is Storage.BOOL:
            return f"{call} != 0", _COMPARE
        if storage in (Storage.FP32, Storage.I32, Storage.I64):
            return call, _ATOM
        return f"{call}.to({_TYPE[storage.dtype]})", _ATOM


_SPECIAL: dict[Op, Callable[[_Writer, Expr], tuple[str, int]]] = {
    Op.CONST: _Writer._const,
    Op.INPUT: _Writer._input,
    Op.SCALAR: _Writer._scalar,
    Op.SIZE: _Writer._size,
    Op.CAST: _Writer._cast,
    Op.FLOORDIV: _Writer._floordiv,
    Op.MOD: _Writer._mod,
    Op.LOAD: _Writer._load,
    Op.DETACH: lambda writer, node: writer.known[node.args[0]],
}


def _power_of_two(node: Expr) -> int | None:
    """The exponent when `node` is a literal power of two: shifting floors for both signs."""
    if (
        node.op is Op.CONST
        and isinstance(node.attr, int)
        and node.attr > 0
        and node.attr & (node.attr - 1) == 0
    ):
        return node.attr.bit_length() - 1
    return None


def hoisted_name(node: Expr, names: tuple[str, ...], taken: set[str], stem: str) -> str:
    """A name for a value that is computed once a head, row or column: after the capture it is loaded from."""
    name = stem
    if node.op is Op.LOAD and isinstance(node.attr, int):
        indices = "_".join(i.attr.value for i in node.args if isinstance(i.attr, Input))
        name = f"{names[node.attr]}_{indices}" if indices else f"{names[node.attr]}_{stem}"
    elif node.op is Op.CAST and isinstance(node.args[0].attr, Input):
        name = f"{node.args[0].attr.value}_f32"
    name = re.sub(r"_idx\b|_idx(?=_)", "", name)
    base, n = name, 2
    while name in taken:
        name, n = f"{base}_{n}", n + 1
    taken.add(name)
    return name
