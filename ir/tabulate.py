"""What a mask computes of the query alone, or of the key alone, as tables: intervals of these are exact.

Analysis by intervals loses the remainder of `q_idx % width` over a tile that crosses a multiple of the width,
and all of a Morton order's bits or a permutation's look-ups. Such a part reads one index, so all its values
are few: they are computed once, and become a captured tensor, whose least and greatest over any range
`RangeTables` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.ir.arrays import Array, Arrays, convert
from flexc.ir.build import input_, load
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, fold, rebuild, with_args
from flexc.ir.ops import Input, Op
from flexc.ir.runs import TileGrid

_MOST_ELEMENTS = 2**24
"""Of all tables together: 64 MB of 32-bit numbers."""
_CHUNK = 2**16
_AXES = (Input.Q_IDX, Input.KV_IDX)

_NEIGHBOURS = 2  # over neighbouring indices, the values are neighbours or equal: intervals lose nothing
_EXTREMES = 1  # intervals give the exact least and greatest value, but not all between occur
_LOOSE = 0  # intervals may be too wide


@dataclass(frozen=True, slots=True)
class Tabulated:
    """A mask that reads tables, and the captures with the tables at their end."""

    mask: Expr
    values: tuple[Array, ...]


def tabulate(mask: Expr, values: Sequence[Array], grid: TileGrid, arrays: Arrays) -> Tabulated:
    """`mask` with its largest parts of one index that intervals are loose for as look-ups in new captures.

    `mask` is bound; the result means the same within the lengths of `grid`.
    """
    reads = fold([mask], _reads)
    levels = fold([mask], lambda node, of_args: _level(node, of_args, reads))
    tables: dict[Expr, Expr] = {}
    found = list(values)
    room = _MOST_ELEMENTS
    for node in _largest_parts(mask, reads):
        size = _size(reads[node], grid)
        if levels[node] == _LOOSE and size <= room:
            room -= size
            tables[node] = load(len(found), _indices(reads[node]), node.dtype)
            found.append(_table(node, reads[node], values, grid, arrays))
    if not tables:
        return Tabulated(mask, tuple(values))
    return Tabulated(rebuild(mask, lambda n, args: tables.get(n) or with_args(n, args)), tuple(found))


def _reads(node: Expr, of_args: tuple[frozenset[Input], ...]) -> frozenset[Input]:
    own = frozenset({node.attr} if isinstance(node.attr, Input) else ())
    return own.union(*of_args)


def _largest_parts(mask: Expr, reads: dict[Expr, frozenset[Input]]) -> list[Expr]:
    """The nodes of one axis that no other node of that axis uses from the outside."""
    parts, stack, done = [], [mask], set()
    while stack:
        node = stack.pop()
        if node in done:
            continue
        done.add(node)
        axes = reads[node].intersection(_AXES)
        if len(axes) == 1:
            parts.append(node)
        elif axes:
            stack.extend(node.args)
    return parts


def _level(node: Expr, of_args: tuple[int, ...], reads: dict[Expr, frozenset[Input]]) -> int:
    """How tight the interval of a node is that reads one axis."""
    varying = [i for i, arg in enumerate(node.args) if reads[arg].intersection(_AXES)]
    if not varying:
        return _NEIGHBOURS
    if len(varying) > 1:
        return _LOOSE
    level = of_args[varying[0]]
    match node.op:
        case Op.ADD | Op.SUB | Op.NEG | Op.MIN | Op.MAX | Op.NOT:
            return level
        case Op.FLOORDIV | Op.SHR if varying == [0] and node.args[1].op is Op.CONST:
            return level
        case Op.MUL | Op.LT | Op.LE | Op.CAST:
            return min(level, _EXTREMES)
        case Op.LOAD:
            return _EXTREMES if level == _NEIGHBOURS else _LOOSE
    return _LOOSE


def _dimensions(reads: frozenset[Input], grid: TileGrid) -> list[tuple[Input, int]]:
    """The inputs that index a table, in order, and their lengths."""
    lengths = {
        Input.B: grid.batch,
        Input.H: grid.heads,
        Input.Q_IDX: grid.q_len,
        Input.KV_IDX: grid.kv_len,
    }
    return [(which, length) for which, length in lengths.items() if which in reads]


def _size(reads: frozenset[Input], grid: TileGrid) -> int:
    size = 1
    for _, length in _dimensions(reads, grid):
        size *= length
    return size


def _indices(reads: frozenset[Input]) -> tuple[Expr, ...]:
    return tuple(input_(w) for w in (Input.B, Input.H, *_AXES) if w in reads)


def _table(
    node: Expr, reads: frozenset[Input], values: Sequence[Array], grid: TileGrid, arrays: Arrays
) -> Array:
    """All values of a part, of its own type: `[batch, heads, length]`, of these what it reads."""
    xp = arrays.xp
    *outer, (axis, length) = _dimensions(reads, grid)
    inputs = {}
    for place, (which, count) in enumerate(outer):
        shape = (1,) * place + (count,) + (1,) * (len(outer) - place)
        inputs[which] = convert(xp, arrays.arange(count), xp.int32).reshape(shape)
    step = max(1, _CHUNK * length // max(1, _size(reads, grid)))
    parts = []
    for start in range(0, length, step):
        index = arrays.arange(min(step, length - start)) + start
        env = Env(inputs | {axis: convert(xp, index, xp.int32)}, values, xp, xp.float32)
        shape = (*(count for _, count in outer), len(index))
        parts.append(xp.broadcast_to(evaluate(node, env), shape))
    return parts[0] if len(parts) == 1 else xp.concatenate(tuple(parts), -1)
