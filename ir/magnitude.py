"""How large integers of a mask can get, from what is known before a call: Python integers, no arrays.

`interval.py` bounds nodes for given boxes and values; here only literals are known. Positions are below
`LONGEST`, and captured Python numbers are within bounds that a call can check (`Within`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from flexc.ir.expr import Expr, topological
from flexc.ir.ops import COMPARISONS, Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.ranges import LONGEST, Within
from flexc.ir.types import DType

LARGE = 2**30
_ADDED = 2**28
_MULTIPLIED = 2**8
HUGE = 2**60
_MOST_BATCHES = 2**20
_INPUTS = {
    Input.B: _MOST_BATCHES - 1,
    Input.H: _MOST_BATCHES - 1,
    Input.Q_IDX: LONGEST - 1,
    Input.Q_LEN: LONGEST,
    Input.KV_LEN: LONGEST,
}


class Extent(NamedTuple):
    """Inclusive least and greatest."""

    lo: int
    hi: int

    def inside(self, other: Extent) -> bool:
        return other.lo <= self.lo and self.hi <= other.hi


WIDTH = {
    DType.BOOL: Extent(0, 1),
    DType.I32: Extent(-(2**31), 2**31 - 1),
    DType.I64: Extent(-(2**63), 2**63 - 1),
}
_SUMS = frozenset({Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.SHL})
_KEEPING = frozenset({Op.CAST, Op.MIN, Op.MAX, Op.ABS})
_TRUSTED = {DType.I32: Extent(-LARGE, LARGE), DType.I64: Extent(-HUGE, HUGE)}


def assumed_numbers(root: Expr) -> dict[int, Within]:
    """By slot, the bounds that a closed form of `root` asks of the captured integers.

    A divisor is positive, and so is what multiplies a term of the key; a number that the mask adds leaves
    room for others in 32 bits; one that is only compared may be as large as it likes, so that a window of
    2**31 - 1 still means none.
    """
    placements = place(root)
    found: dict[int, Within] = {}
    for node in topological(root):
        for i, arg in enumerate(node.args):
            number = arg.args[0] if arg.op is Op.CAST else arg
            if (
                number.op is not Op.SCALAR
                or number.dtype is not DType.I32
                or not isinstance(number.attr, int)
            ):
                continue
            if node.op is Op.CAST:  # seen at the one who reads the converted number
                continue
            least, greatest = -_ADDED, _ADDED
            if node.op in (Op.FLOORDIV, Op.MOD) and i == 1:
                least, greatest = 1, LONGEST
            elif node.op is Op.MUL and placements[node] >= Placement.COLUMN:
                least, greatest = 1, _MULTIPLIED
            elif node.op in COMPARISONS:
                least, greatest = -LARGE, WIDTH[DType.I32].hi
            slot = number.attr
            known = found.get(slot, Within(slot, least, greatest))
            found[slot] = Within(slot, max(least, known.least), min(greatest, known.greatest))
    return found


def trusted_tensors(root: Expr) -> frozenset[int]:
    """The slots of captured tensors that `root` adds to positions of keys, or to sums of them.

    Nobody means these sums to wrap: a closed form takes the tensors to hold at most 2**30 (2**60 in 64 bits).
    Only what is compared alone may be as large as it likes.
    """
    placements = place(root)
    summed: set[Expr] = set()
    for node in topological(root):
        if node.op in _SUMS and placements[node] >= Placement.COLUMN:
            summed.update(node.args)
    for node in reversed(topological(root)):
        if node in summed and node.op in _SUMS | _KEEPING:
            summed.update(node.args)
    return frozenset(node.attr for node in summed if node.op is Op.LOAD and isinstance(node.attr, int))


class Magnitudes:
    """The extents of integer and boolean nodes, remembered.

    `positions` are captured values known to be positions; `trusted` are slots, see `trusted_tensors`;
    no key lies at `longest` or beyond.
    """

    def __init__(
        self,
        numbers: dict[int, Within],
        positions: frozenset[Expr],
        trusted: frozenset[int],
        longest: int,
    ) -> None:
        self.numbers = numbers
        self.positions = positions
        self.trusted = trusted
        self.longest = longest
        self._exact: dict[Expr, Extent] = {}

    def of(self, node: Expr) -> Extent:
        """Of the value: as large as the type where the arithmetic may wrap."""
        exact = self.exact(node)
        return exact if exact.inside(WIDTH[node.dtype]) else WIDTH[node.dtype]

    def wraps(self, node: Expr) -> bool:
        """Whether the number may not fit its type."""
        return not self.exact(node).inside(WIDTH[node.dtype])

    def exact(self, node: Expr) -> Extent:
        """Of the number, without wrapping at this node."""
        found = self._exact.get(node)
        if found is None:
            for inner in topological(node):
                if inner not in self._exact and inner.dtype in WIDTH:
                    self._exact[inner] = self._extent(inner)
            found = self._exact[node]
        return found

    def _extent(self, node: Expr) -> Extent:
        if node.op is Op.CONST:
            value = int(node.attr) if isinstance(node.attr, bool | int) else 0
            return Extent(value, value)
        if node.dtype is DType.BOOL:
            return WIDTH[DType.BOOL]
        if node.attr is Input.KV_IDX:
            return Extent(0, self.longest - 1)
        if isinstance(node.attr, Input):
            return Extent(0, _INPUTS[node.attr])
        if node.op is Op.SIZE:
            return Extent(0, WIDTH[DType.I32].hi)
        if node.op is Op.SCALAR and isinstance(node.attr, int) and node.attr in self.numbers:
            within = self.numbers[node.attr]
            return Extent(within.least, within.greatest)
        if node in self.positions:
            return Extent(0, LONGEST)
        if node.op in (Op.LOAD, Op.SCALAR):
            return _TRUSTED[node.dtype] if node.attr in self.trusted else WIDTH[node.dtype]
        if any(arg.dtype is DType.F32 for arg in node.args) or node.op not in _RULES:
            return WIDTH[node.dtype]
        return _RULES[node.op](node, [self.of(arg) for arg in node.args])


def _hull(corners: Iterator[int] | list[int]) -> Extent:
    numbers = list(corners)
    return Extent(min(numbers), max(numbers))


def _mul(node: Expr, args: list[Extent]) -> Extent:
    a, b = args
    return _hull(x * y for x in a for y in b)


def _abs(node: Expr, args: list[Extent]) -> Extent:
    lo, hi = args[0]
    return Extent(max(lo, -hi, 0), max(-lo, hi))


def _floordiv(node: Expr, args: list[Extent]) -> Extent:
    a, divisor = args
    if divisor.lo < 1:
        return WIDTH[node.dtype]
    return _hull(x // y for x in a for y in divisor)


def _mod(node: Expr, args: list[Extent]) -> Extent:
    a, divisor = args
    if divisor.lo < 1:
        return WIDTH[node.dtype]
    return Extent(0, min(divisor.hi - 1, a.hi) if a.lo >= 0 else divisor.hi - 1)


def _bit_and(node: Expr, args: list[Extent]) -> Extent:
    known = [arg.hi for arg in args if arg.lo >= 0]
    return Extent(0, min(known)) if known else WIDTH[node.dtype]


def _shift(node: Expr, args: list[Extent]) -> Extent:
    a, count = args
    if count.lo != count.hi or not 0 <= count.lo < 31:
        return WIDTH[node.dtype]
    return Extent(*((x << count.lo if node.op is Op.SHL else x >> count.lo) for x in a))


def _cast(node: Expr, args: list[Extent]) -> Extent:
    return args[0]


_RULES: dict[Op, Callable[[Expr, list[Extent]], Extent]] = {
    Op.ADD: lambda node, x: Extent(x[0].lo + x[1].lo, x[0].hi + x[1].hi),
    Op.SUB: lambda node, x: Extent(x[0].lo - x[1].hi, x[0].hi - x[1].lo),
    Op.NEG: lambda node, x: Extent(-x[0].hi, -x[0].lo),
    Op.BIT_NOT: lambda node, x: Extent(~x[0].hi, ~x[0].lo),
    Op.MIN: lambda node, x: Extent(min(x[0].lo, x[1].lo), min(x[0].hi, x[1].hi)),
    Op.MAX: lambda node, x: Extent(max(x[0].lo, x[1].lo), max(x[0].hi, x[1].hi)),
    Op.WHERE: lambda node, x: Extent(min(x[1].lo, x[2].lo), max(x[1].hi, x[2].hi)),
    Op.SIGN: lambda node, x: Extent(-1, 1),
    Op.MUL: _mul,
    Op.ABS: _abs,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.BIT_AND: _bit_and,
    Op.SHL: _shift,
    Op.SHR: _shift,
    Op.CAST: _cast,
}
