"""A mask's closed form as the loop bounds of one tile of queries: statements of the generated kernel.

For each range: from where to where the tile's rows may see keys (`kv_first`, `kv_end`), and between which
keys all of them see everything (`full_first`, `full_end`), so that no mask applies there. A bound that is
monotone in the row is evaluated at the tile's first or last row, as a scalar; any other as a vector over the
rows, reduced by `tl.min` or `tl.max`.

A kernel that keeps a tile of keys and walks the queries has the ranges of the transposed mask (`BY_KEYS`):
the same with queries and keys exchanged.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flexc.codegen.emit import LINE_LENGTH, Scope, emit
from flexc.codegen.hoisting import Hoisting
from flexc.codegen.monotone import Trend, trend
from flexc.codegen.signs import nonnegative
from flexc.ir.build import binary, cast, const, input_
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.printer import to_formula
from flexc.ir.ranges import Range, Ranges
from flexc.ir.simplify import simplify
from flexc.ir.substitute import transposed
from flexc.ir.types import DType

_Q, _KV_LEN = input_(Input.Q_IDX), input_(Input.KV_LEN)


@dataclass(frozen=True, slots=True)
class Axes:
    """Which axis a program keeps a tile of and which it walks, by the names of the generated code."""

    kept: str
    walked: str
    kept_tile: str
    walked_tile: str
    vector: str
    """What the bounds of one kept index are called, where they are vectors."""
    sees: str
    by_keys: bool = False

    def own(self, bound: Expr) -> Expr:
        """An expression of a range in the kernel's own inputs: a range's `q_idx` is the kept axis."""
        return transposed(bound) if self.by_keys else bound


BY_QUERIES = Axes("q", "kv", "BLOCK_Q", "BLOCK_KV", "row", "has_keys")
BY_KEYS = Axes("kv", "q", "BLOCK_KV", "BLOCK_Q", "column", "has_rows", by_keys=True)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a kernel walks the tiles of keys that a tile of queries may see.

    Said of `BY_QUERIES`; by keys, `q_start`, `q_idx`, `kv_first`, `kv_end`, `kv_start` and BLOCK_KV are
    `kv_start`, `kv_idx`, `q_first`, `q_end`, `q_start` and BLOCK_Q.

    `lines` read `q_start`, `q_len`, `kv_len`, what `Hoisting` bound, and, where `reads_rows`, `q_idx`: the
    tile's rows as a vector, those past the end repeating the last. With one range they define `kv_first`,
    `full_first`, `full_end` and `kv_end`. With more, the kernel loops `for stretch in range(count)`:
    `stretch_lines` define the four there, in ascending order and without a tile that an earlier stretch had.
    Of the four, `full_first` or `full_end` is left out where `masked` does not read it.
    `kv_first` and `full_end` are multiples of BLOCK_KV. `masked` is the condition on
    `kv_start` under which the mask applies to a tile. `first_rows_heaviest`: no row sees more keys than the
    one before; `last_rows_heaviest`: none sees more than the one after.
    """

    count: int
    comments: tuple[str, ...]
    lines: tuple[str, ...]
    stretch_lines: tuple[str, ...]
    masked: str
    reads_rows: bool
    first_rows_heaviest: bool
    last_rows_heaviest: bool


def range_roots(ranges: Ranges, axes: Axes = BY_QUERIES) -> list[Expr]:
    """The expressions that the bounds are computed from, in the kernel's own inputs."""
    return [axes.own(e) for r in ranges.ranges for e in (r.first, r.end, r.full_first, r.full_end)]


def tile_bounds(ranges: Ranges, hoisting: Hoisting, axes: Axes = BY_QUERIES) -> Bounds:
    """The bounds of `ranges`, of which there is at least one, for a kernel whose mods `hoisting` split.

    `hoisting` must know `range_roots(ranges, axes)` as its bounds. New names and helpers are noted there.
    """
    writer = _Writer(hoisting, axes)
    count = len(ranges.ranges)
    suffixes = [""] if count == 1 else [f"_{n + 1}" for n in range(count)]
    for found, suffix in zip(ranges.ranges, suffixes, strict=True):
        writer.range_lines(found, suffix)
    start = f"{axes.walked}_start"
    masked = f"({start} < full_first) | ({start} >= full_end)"
    stretch_lines: tuple[str, ...] = ()
    if count > 1:
        ranks = writer.rank_lines(ranges.is_sorted)
        stretch_lines = _stretch_lines(ranks, writer.unvisited_lines(ranges.is_sorted), axes.walked)
    elif axes.by_keys and ranges.ranges[0].full_end is _KV_LEN:
        # The last rows may hang over the end: what a kernel knows of rows there makes their weights 0.
        masked = f"{start} < full_first"
        writer.lines = [line for line in writer.lines if not line.startswith("full_end = ")]
    elif _literal(ranges.ranges[0].full_first) <= 0:
        masked = f"{start} >= full_end"
        writer.lines = [line for line in writer.lines if not line.startswith("full_first = ")]
    return Bounds(
        count=count,
        comments=tuple(_comments(ranges, hoisting.names, axes)),
        lines=(*writer.row_ends, *writer.lines),
        stretch_lines=stretch_lines,
        masked=masked,
        reads_rows=writer.reads_rows,
        first_rows_heaviest=_changes(ranges) == Trend(rises=False, falls=True),
        last_rows_heaviest=_changes(ranges) == Trend(rises=True, falls=False),
    )


def _changes(ranges: Ranges) -> Trend:
    """What the number of keys does from row to row."""
    found = Trend(rises=False, falls=False)
    for of in ranges.ranges:
        found = found.join(trend(binary(Op.SUB, _at_most_kv_len(of.end), _at_least_0(of.first))))
    return found


def describe_ranges(ranges: Ranges, names: tuple[str, ...], axes: Axes = BY_QUERIES) -> str:
    """The keys that a row sees, as formulas: `0 <= kv_idx < q_idx + 1`; or the rows that see a key."""
    return ", or ".join(
        f"{to_formula(axes.own(r.first), names)} <= {axes.walked}_idx < {to_formula(axes.own(r.end), names)}"
        for r in ranges.ranges
    )


def _comments(ranges: Ranges, names: tuple[str, ...], axes: Axes) -> list[str]:
    formulas = describe_ranges(ranges, names, axes)
    if axes.by_keys:
        text = (
            f"A key is seen by rows {formulas}. These keys visit q_first to q_end; from full_first to "
            "full_end every row sees all of them, so that no mask applies."
        )
    else:
        text = (
            f"A row sees {formulas}. These rows visit kv_first to kv_end; from full_first "
            "to full_end all of them see every key, so that no mask applies."
        )
    return textwrap.wrap(text, LINE_LENGTH - 6, break_long_words=False, break_on_hyphens=False)


class _Start(NamedTuple):
    """Where a range starts in a tile. `every_row`: rows that see nothing of it were not left out."""

    name: str
    text: str
    every_row: bool


class _Writer:
    """Collects the statements; `row_ends` name the tile's first and last row where something needs them.

    Rows are the kept axis, keys the walked one.
    """

    def __init__(self, hoisting: Hoisting, axes: Axes) -> None:
        self.axes = axes
        self.lines: list[str] = []
        self.reads_rows = False
        self._hoisting = hoisting
        self._ends: dict[str, str] = {}
        self._starts: list[_Start] = []
        levels = place(*hoisting.bound)
        self._scalars = {n: name for n, name in hoisting.bound.items() if levels[n] <= Placement.HEAD}
        self._index = axes.own(_Q)
        self._vectors = dict(hoisting.bound)

    @property
    def row_ends(self) -> list[str]:
        """The definition of the last row, as far as it is read."""
        return list(self._ends.values())

    def range_lines(self, found: Range, suffix: str) -> None:
        """Write the four bounds of a range."""
        first, end = _at_least_0(found.first), _at_most_kv_len(found.end)
        full_first, full_end = _at_least_0(found.full_first), _at_most_kv_len(found.full_end)
        every_row = trend(first).is_monotone and trend(end).is_monotone
        if every_row:
            low, high = self._at_low(first), self._at_high(end)
        else:
            low, high = self._seen(first, end, suffix)
        walked, tile = self.axes.walked, self.axes.walked_tile
        low = _aligned(low, tile)
        self.lines.append(f"{walked}_first{suffix} = {low}")
        self.lines.append(f"full_first{suffix} = {self._highest(full_first)}")
        self.lines.append(f"full_end{suffix} = {_aligned(self._lowest(full_end), tile)}")
        self.lines.append(f"{walked}_end{suffix} = {high}")
        self._starts.append(_Start(f"{walked}_first{suffix}", low, every_row))

    def _seen(self, first: Expr, end: Expr, suffix: str) -> tuple[str, str]:
        """The extremes of a range over the rows that see any of it."""
        axes = self.axes
        names = [f"{axes.vector}_first{suffix}", f"{axes.vector}_end{suffix}"]
        for name, bound in zip(names, (first, end), strict=True):
            self._rows(bound, name)
            self._vectors[axes.own(bound)] = name
        sees = f"{axes.sees}{suffix}"
        self.lines.append(f"{sees} = {names[0]} < {names[1]}")
        low = f"tl.min(tl.where({sees}, {names[0]}, {axes.walked}_len))"
        return low, f"tl.max(tl.where({sees}, {names[1]}, 0))"

    def _lowest(self, bound: Expr) -> str:
        return self._at_low(bound) if trend(bound).is_monotone else f"tl.min({self._rows(bound)})"

    def _highest(self, bound: Expr) -> str:
        return self._at_high(bound) if trend(bound).is_monotone else f"tl.max({self._rows(bound)})"

    def _at_low(self, bound: Expr) -> str:
        return self._at(bound, "last" if trend(bound).falls else "start")

    def _at_high(self, bound: Expr) -> str:
        return self._at(bound, "last" if trend(bound).rises else "start")

    def _at(self, bound: Expr, end: str) -> str:
        """The text of a bound at the tile's first or last row."""
        kept = self.axes.kept
        text = self._emit(bound, {**self._scalars, self._index: f"{kept}_{end}"})
        if Input.Q_IDX in inputs_of(bound) and end == "last":
            last = f"{kept}_last = tl.minimum({kept}_start + {self.axes.kept_tile}, {kept}_len) - 1"
            self._ends[end] = last
        return text

    def _rows(self, bound: Expr, name: str | None = None) -> str:
        """The text of a bound at every row of the tile, assigned to `name` if there is one."""
        self.reads_rows = True
        return self._emit(bound, self._vectors, name)

    def _emit(self, bound: Expr, known: Mapping[Expr, str], name: str | None = None) -> str:
        hoisting = self._hoisting
        scope = Scope(hoisting.spec, hoisting.names, known, hoisting.taken, hoisting.exact)
        block = emit(scope, [self.axes.own(bound)], [name])
        hoisting.helpers |= block.helpers
        hoisting.inputs |= block.inputs - {self._index.attr}
        self.lines += block.statements
        return block.results[0]

    def rank_lines(self, in_order: bool) -> list[str]:
        """Write how many ranges start before each but the last one; the texts of these ranks."""
        ranks = []
        for n in range(len(self._starts) - 1):
            name = f"rank_{n + 1}"
            before = [self._before(other, n, in_order) for other in range(len(self._starts)) if other != n]
            known = before.count("True")
            asked = [f"tl.where({b}, 1, 0)" for b in before if b not in ("True", "False")]
            if not asked:
                ranks.append(str(known))
                continue
            self.lines.append(f"{name} = {asked[0]}{f' + {known}' if known else ''}")
            self.lines += [f"{name} += {term}" for term in asked[1:]]
            ranks.append(name)
        return ranks

    def unvisited_lines(self, in_order: bool) -> list[str]:
        """Write where each range starts when the tiles of those before it are left out; the names of that.

        A running `visited` in the loop over the stretches would say the same, but Triton 3.6 takes it for the
        constant that it starts from.
        """
        names = []
        for n, start in enumerate(self._starts):
            name, text = f"unvisited_{n + 1}", start.name
            for other in range(len(self._starts)):
                before = "False" if other == n else self._before(other, n, in_order)
                if before == "False":
                    continue
                tile = self.axes.walked_tile
                end = f"tl.cdiv({self.axes.walked}_end_{other + 1}, {tile}) * {tile}"
                end = end if before == "True" else f"tl.where({before}, {end}, 0)"
                self.lines.append(f"{name} = tl.maximum({text}, {end})")
                text = name
            names.append(text)
        return names

    def _before(self, a: int, b: int, in_order: bool) -> str:
        """Whether range `a` is visited before `b`: True, False, or a condition. Ties go by number.

        Ranges that start in order in every row do so in the tile if no row was left out of the earlier one.
        """
        first, second = self._starts[a], self._starts[b]
        earlier = self._starts[min(a, b)]
        if (in_order and earlier.every_row) or earlier.text == "0":
            return str(a < b)
        if first.text == "0":
            return "True"
        if second.text == "0":
            return "False"
        return f"{first.name} {'<=' if a < b else '<'} {second.name}"


def _stretch_lines(ranks: list[str], starts: list[str], walked: str) -> tuple[str, ...]:
    """The bounds of the range whose rank is `stretch`, from `starts` on. The last range has no other."""
    lines = []
    last = len(ranks) + 1
    for name in (f"{walked}_first", "full_first", "full_end", f"{walked}_end"):
        of = starts if name == f"{walked}_first" else [f"{name}_{n + 1}" for n in range(last)]
        chosen = of[-1]
        for n in range(last - 2, -1, -1):
            lines.append(f"{name} = tl.where(stretch == {ranks[n]}, {of[n]}, {chosen})")
            chosen = name
    return tuple(lines)


def _at_least_0(bound: Expr) -> Expr:
    """A first key without the part before the keys."""
    if bound.dtype is DType.I64:
        return _narrow(bound)
    if bound in nonnegative(bound):
        return bound
    return simplify(binary(Op.MAX, bound, const(0)))


def _at_most_kv_len(bound: Expr) -> Expr:
    """An end without the part behind the keys."""
    if bound.dtype is DType.I64:
        return _narrow(bound)
    return bound if _is_below_kv_len(bound) else simplify(binary(Op.MIN, bound, _KV_LEN))


def _is_below_kv_len(bound: Expr) -> bool:
    return bound is _KV_LEN or (bound.op is Op.MIN and any(_is_below_kv_len(arg) for arg in bound.args))


def _narrow(bound: Expr) -> Expr:
    """A 64-bit bound, which holds captured 64-bit numbers, clipped to the keys in 32 bits."""
    clipped = binary(Op.MIN, binary(Op.MAX, bound, const(0)), _KV_LEN)
    return simplify(cast(clipped, DType.I32))


def _aligned(text: str, tile: str) -> str:
    """Down to a multiple of a tile. A negative number goes to zero or stays negative."""
    if text == "0":
        return text
    atom = isinstance(ast.parse(text, mode="eval").body, ast.Name | ast.Call | ast.Constant)
    return f"{text if atom else f'({text})'} // {tile} * {tile}"


def _literal(bound: Expr) -> float:
    """The value of a literal; infinity for what is none."""
    return bound.attr if bound.op is Op.CONST and isinstance(bound.attr, int) else float("inf")
