"""The file of a kernel that builds block maps: the mask as functions, its ranges, the arguments."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from flexc._version import __version__
from flexc.codegen.arguments import RESERVED, Argument, Source, capture_arguments, capture_names
from flexc.codegen.emit import Scope, emit
from flexc.codegen.hoisting import Element, Function, Hoisting
from flexc.codegen.kernel_form import decisive, separate_comparisons
from flexc.codegen.render import render
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.map_form import MapSpec
from flexc.ir.place import Placement, place
from flexc.ir.ranges import Range
from flexc.ir.simplify import simplify

ENTRY = "block_map"
NUM_WARPS = 4
SLAB = 16
"""Stretches of a row that one pass keeps for the next; rows with more are walked twice."""

_ROWS, _CHUNK_Q, _CHUNK_KV, _LOOK_AHEAD = 128, 32, 128, 128

MAP_RESERVED = RESERVED | {
    "ROWS", "CHUNK_Q", "CHUNK_KV", "SLAB", "LOOK_AHEAD", "EMPTY", "PARTIAL", "FULL", "UNKNOWN",
    "columns_mod", "block_map", "clipped", "meet_range", "write_stretch", "phase", "heads", "block_q",
    "block_kv", "capacity", "counts_ptr", "slab_ptr", "offsets_ptr", "stretches_ptr", "columns_ptr",
    "kv_blocks", "q_blocks", "start", "end", "held", "columns_start", "holds", "kind", "q_end",
    "whole_tiles", "slab", "slots", "walks", "first_slot", "entries", "kept", "count", "first", "stop",
    "least_reach", "most_reach", "least_ahead", "most_ahead", "any_some", "any_missed", "rows_start",
    "nothing", "reach", "ahead", "some", "low", "high", "next_tile", "missed_to", "columns_row", "look",
    "column_kind", "column_kinds", "alike", "sees_all", "seen", "missed", "pairs", "can_be_full",
    "is_full", "joins", "starts", "fresh",
}  # fmt: skip
"""Names that the template uses: none of a capture."""


@dataclass(frozen=True, slots=True)
class MapKernel:
    """One generated file: its text, the name of its kernel, and what a launcher passes."""

    source: str
    entry: str
    arguments: tuple[Argument, ...]
    captures: tuple[Capture, ...]
    description: str


@dataclass(frozen=True, slots=True)
class _Bounds:
    """A range of each row: statements, and the expressions of its four bounds."""

    lines: tuple[str, ...]
    bounds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """Everything that the template reads. Strings are pieces of Python."""

    header: str
    helpers: tuple[str, ...]
    functions: tuple[Function, ...]
    arguments: tuple[str, ...]
    head_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    column_lines: tuple[str, ...]
    mask_call: str
    columns_head_lines: tuple[str, ...]
    columns_lines: tuple[str, ...]
    columns_call: str | None
    ranges: tuple[_Bounds, ...] | None
    rows: int = _ROWS
    chunk_q: int = _CHUNK_Q
    chunk_kv: int = _CHUNK_KV
    slab: int = SLAB
    look_ahead: int = _LOOK_AHEAD


def map_module(spec: MapSpec) -> MapKernel:
    """The file of the kernel that builds maps of a mask. It serves every target, length and block size."""
    form = spec.form
    names = capture_names(spec.captures, MAP_RESERVED)
    roots = [form.mask, *_bounds_of(form.closed.ranges if form.closed else ())]
    if form.columns is not None:
        roots.append(form.columns)
    arguments = (*_ARGUMENTS, *capture_arguments(spec, names, roots), *_SHAPE)
    taken = {a.name for a in arguments} | MAP_RESERVED
    writer = _MaskWriter(spec, names, taken, form.mask, "mask_mod")
    columns = None if form.columns is None else _MaskWriter(spec, names, taken, form.columns, "columns_mod")
    helpers = writer.helpers | (columns.helpers if columns else frozenset())
    ranges = None
    if form.closed is not None:
        ranges, more = _ranges(spec, names, taken, writer, form.closed.ranges)
        helpers |= more
    view = _View(
        header=_header(writer.element.function.doc),
        helpers=tuple(sorted(helpers)),
        functions=tuple(w.element.function for w in (writer, columns) if w is not None),
        arguments=tuple(a.name for a in arguments),
        head_lines=writer.hoisting.head,
        row_lines=writer.hoisting.row,
        column_lines=writer.column_lines,
        mask_call=writer.element.call(),
        columns_head_lines=() if columns is None else columns.hoisting.head,
        columns_lines=() if columns is None else columns.column_lines,
        columns_call=None if columns is None else columns.element.call(),
        ranges=ranges,
    )
    description = f"block map of {writer.element.function.doc}"
    return MapKernel(render("block_map.py.jinja", view), ENTRY, arguments, spec.captures, description)


class _MaskWriter:
    """A condition as a function of a tile, and what is computed before it."""

    element: Element

    def __init__(
        self, spec: MapSpec, names: tuple[str, ...], taken: set[str], condition: Expr, name: str
    ) -> None:
        root = simplify(separate_comparisons(condition))
        self.hoisting = Hoisting(spec, names, [root], taken)
        self.column_lines = self.hoisting.column_lines(root)
        self.element = self.hoisting.element(name, root, condition)
        self.helpers = frozenset(self.hoisting.helpers) | self.element.helpers


def _ranges(
    spec: MapSpec, names: tuple[str, ...], taken: set[str], writer: _MaskWriter, ranges: tuple[Range, ...]
) -> tuple[tuple[_Bounds, ...], frozenset[str]]:
    bound = writer.hoisting.bound
    levels = place(*bound) if bound else {}
    of_head = {n: name for n, name in bound.items() if levels[n] in (Placement.KERNEL, Placement.HEAD)}
    helpers: frozenset[str] = frozenset()
    written = []
    for item in ranges:
        roots = _bounds_of((item,))
        scope = Scope(spec, names, of_head, set(writer.hoisting.taken | taken), decisive(*roots))
        block = emit(scope, roots, [None] * 4)
        helpers |= block.helpers
        written.append(_Bounds(tuple(block.statements), tuple(block.results)))
    return tuple(written), helpers


def _bounds_of(ranges: tuple[Range, ...]) -> list[Expr]:
    return [bound for r in ranges for bound in (r.first, r.end, r.full_first, r.full_end)]


_ARGUMENTS = tuple(
    Argument(name, "*i32", Source.NAMED)
    for name in ("counts_ptr", "slab_ptr", "offsets_ptr", "stretches_ptr", "columns_ptr")
)
_SHAPE = tuple(
    Argument(name, "i32", Source.NAMED)
    for name in ("q_len", "kv_len", "heads", "block_q", "block_kv", "capacity", "phase")
)


def _header(formula: str) -> str:
    lines = [
        '"""Builds the block map of a mask on the GPU that the mask is for.',
        "",
        *textwrap.wrap(f"The mask: {formula}", 100),
        "",
        f"Generated by flexc {__version__}. Launch batch * heads * cdiv(q_len, block_q) programs with",
        f"num_warps={NUM_WARPS}.",
        '"""',
    ]
    return "\n".join(lines)
