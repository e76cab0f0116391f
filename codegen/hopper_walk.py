"""Hopper programs that walk along a head: for masks whose rows see few keys, such as a window of 128.

A program has one warpgroup, which loads for itself. It computes 64 rows with all keys that they see at once,
then the next 64, for which most of these keys are still in shared memory. Two or three such programs fit
beside each other, and share one copy of the code in the instruction cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from flexc.codegen.bands import Band
from flexc.codegen.blocks import ranges_of
from flexc.codegen.hoisting import mask_form
from flexc.codegen.hopper_masks import Side, has_two_ends
from flexc.codegen.tiles import Tiles
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Op
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec

DIM = 64
"""Head dimensions, padded."""
_SIDE = 64
"""Rows and keys of a tile."""
_FEWEST, _MOST = 2, 5
"""Tiles of keys that 64 rows see, at most: what shared memory holds of keys and values."""
_ALIGNED = " // BLOCK_KV * BLOCK_KV"
_ENDS_OF_ROW = {"kv_first": "row_first", "full_end": "row_end"}
_BEGINNING = 1.5
"""How many tiles of rows the beginning of a program costs, about: it loads keys that another has loaded."""
_MOST_ROUNDS = 8
OPTIONS = ("block_q", "block_kv", "num_stages")
"""Who asks for one of these does not ask for a walk."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Pieces of the template, for all tiles of keys that rows see, of which 0 is the last one.

    `first` and `end` are the comparisons of the mask.
    """

    first: Side
    end: Side
    tiles: tuple[int, ...]

    @staticmethod
    def load_lines(lines: Sequence[str]) -> tuple[str, ...]:
        """What finds the keys of rows; where those of the first row begin and end has names of its own."""
        found = []
        for line in lines:
            name, _, text = line.partition(" = ")
            if name in _ENDS_OF_ROW and text.endswith(_ALIGNED):
                end = _ENDS_OF_ROW[name]
                found += [f"{end} = {text.removesuffix(_ALIGNED)}", f"{name} = {end}{_ALIGNED}"]
            else:
                found.append(line)
        return tuple(found)

    @property
    def count(self) -> str:
        """How many keys of a tile are not past a row's end, of those from `kv_from` on."""
        _, sign, near = self.end.allowed.split(" ", 2)
        return f"{near} + 1" if sign == "<=" else near

    @property
    def after_first(self) -> str:
        """Whether a key is not before the first one of a row, nor before the first tile: there are none."""
        name, rest = self.first.allowed.split(" - ", 1)
        least = "kv_first" if "<=" in rest else "kv_first - 1"
        return f"gl.maximum({name}, {least}) - {rest}"

    @property
    def scores(self) -> str:
        """The names of all scores."""
        return ", ".join(f"score_{n}" for n in self.tiles)

    @property
    def largest(self) -> str:
        """The larger ones of the scores, column by column; the first tile's are in those of the last one."""
        return reduce(lambda a, b: f"gl.maximum({a}, {b})", self.scores.split(", ")[:-1])

    @property
    def weights(self) -> str:
        """The sum of the weights of these, column by column."""
        return " + ".join(f"p_{n}" for n in self.tiles[:-1])


def walk_of(sides: Sequence[Side], stages: int) -> Walk:
    """The pieces, from the two sides of the mask."""
    (first,) = [side for side in sides if not side.at_end]
    (end,) = [side for side in sides if side.at_end]
    return Walk(first, end, tuple(range(stages)))


def tiles_of_walk(stages: int) -> Tiles:
    """The tiles of programs that walk, where 64 rows see so many tiles of keys."""
    return Tiles(_SIDE, _SIDE, 4, stages)


def registers_of_walk(stages: int) -> int:
    """Of a thread. With few tiles there is shared memory for three programs, and they need no more."""
    return 168 if stages <= 3 else 255


def stages_of_walk(spec: AttentionSpec, band: Band | None) -> int:
    """How many tiles of keys kernels that walk have for `spec`; 0 if they can't serve it, or have too few.

    A row sees so few keys that no two of them, in the first tile and in the last one, are in the same column.
    """
    allowed = mask_form(spec)
    if allowed is None or band is None or not band.steady or not _serves(spec, allowed):
        return 0
    stages = max(band.tiles, -(-band.keys // _SIDE) + 1, _FEWEST)
    return stages if stages <= _MOST and has_two_ends(allowed, ranges_of(spec)) else 0


def _serves(spec: AttentionSpec, allowed: Expr) -> bool:
    """Whether the mask reads nothing from memory, and the score_mod only what is of a head or a row."""
    if spec.dropout or spec.few_rows or spec.packed_heads > 1:
        return False
    roots = [allowed] if spec.score is None else [allowed, spec.score]
    reads = [level for node, level in place(*roots).items() if node.op is Op.LOAD]
    return all(level <= Placement.ROW for level in reads) and all(
        node.op is not Op.LOAD for node in topological(allowed)
    )


def shared_memory(stages: int) -> int:
    """Bytes: a tile of queries and one of the output, keys and values; barriers, what threads exchange."""
    return (1 + 1 + 2 * stages) * _SIDE * DIM * 2 + 2048


def parts_of_head(tiles: int, heads: int, places: int) -> int:
    """In how many parts programs walk along a head of so many tiles of rows, so that the last ends early.

    `places` is how many programs run at a time.
    """

    def ends(parts: int) -> float:
        rounds = -(-heads * parts // places)
        return rounds * (-(-tiles // parts) + _BEGINNING)

    fullest = {min(max(rounds * places // heads, 1), tiles) for rounds in range(1, _MOST_ROUNDS + 1)}
    return min(sorted(fullest), key=ends)
