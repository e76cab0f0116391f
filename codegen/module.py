"""Gathers what one generated file says: header, constants, the mods as functions, the kernel's pieces."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from flexc._version import __version__
from flexc.codegen.arguments import Argument, capture_names, forward_arguments
from flexc.codegen.blocks import ranges_of
from flexc.codegen.bounds import Bounds, range_roots, tile_bounds
from flexc.codegen.diagonals import diagonal_constants
from flexc.codegen.distance import reads_by_distance
from flexc.codegen.hoisting import Element, Hoisting, Vector, as_tile, mask_form, of_functions, score_form
from flexc.codegen.plan import KernelPlan
from flexc.codegen.preamble import LN2, LOG2E, Constant, Preamble
from flexc.codegen.render import render
from flexc.codegen.tiles import PAIRS
from flexc.ir.expr import Expr
from flexc.ir.graph import ModSource
from flexc.ir.ops import Input
from flexc.ir.spec import AttentionSpec, Blocks

ENTRY = "attention_forward"


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """One generated file: its text, and what a launcher must know of it."""

    source: str
    entry: str
    arguments: tuple[Argument, ...]
    plan: KernelPlan
    placement: tuple[str, ...]
    """What is computed once a head, a row or a column, one line each, for `explain`."""


@dataclass(frozen=True, slots=True)
class _Forward(Preamble):
    """Everything that the forward template reads. Strings are pieces of Python, booleans are features."""

    arguments: tuple[str, ...]
    vectors: tuple[Vector, ...]
    by_keys: bool
    """Whether tiles have keys as their rows."""
    head_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    score_column_lines: tuple[str, ...]
    mask_column_lines: tuple[str, ...]
    rows: str
    """The constant that is the number of rows of a tile."""
    packed: bool
    """Whether these are rows of several heads."""
    mods_read_rows: bool
    mods_read_columns: bool
    mask_call: str | None
    score_call: str | None
    score_scale: str
    q_mask: str
    k_mask: str
    k_mask_whole: str
    v_mask: str
    v_mask_whole: str
    out_mask: str
    convert_k: bool
    convert_v: bool
    blocks_from_map: bool
    bounds: Bounds | None
    masked: str
    across_heads: bool
    """Whether tiles of all heads with as many keys are neighbours. Else those of a head are."""
    order: str
    q_start: str
    sinks: bool
    lse: bool
    rescue_nan: bool
    dropout: bool
    pairs: bool
    """Whether fp32 is multiplied as pairs of fp16 numbers: tiles of K are then (BLOCK_KV, PADDED_DIM)."""


# Which rows of a head come first, and where those of a program start.
_LAST_ROWS_FIRST = (
    "Its last rows come first: under a causal mask they have the most keys.",
    "(q_tiles - 1 - pid % q_tiles) * BLOCK_Q",
)
_FIRST_ROWS_FIRST = (
    "Its first rows come first: they have the most keys.",
    "pid % q_tiles * BLOCK_Q",
)
# The same of all heads: programs of pairs are few and long, and those of one head after those of another
# would leave the last head's longest to few processors. They compute longer than a tile takes from memory.
_LAST_ROWS_OF_ALL_FIRST = (
    "The last rows of all heads come first: under a causal mask they have the most keys.",
    "(q_tiles - 1 - pid // head_count) * BLOCK_Q",
)
_FIRST_ROWS_OF_ALL_FIRST = (
    "The first rows of all heads come first: they have the most keys.",
    "pid // head_count * BLOCK_Q",
)


def forward_module(spec: AttentionSpec, plan: KernelPlan, sources: tuple[ModSource, ...]) -> GeneratedKernel:
    """The file of a forward kernel."""
    names = capture_names(spec.captures)
    ranges = ranges_of(spec)
    arguments = forward_arguments(spec, names, [] if ranges is None else range_roots(ranges))
    view = _view(spec, plan, sources, names, arguments)
    return GeneratedKernel(render("forward.py.jinja", view), ENTRY, arguments, plan, _placement(view))


def _placement(view: _Forward) -> tuple[str, ...]:
    levels = {
        "head": view.head_lines,
        "row": view.row_lines,
        "column": (*view.score_column_lines, *view.mask_column_lines),
    }
    lines = [f"once a {level}: {line}" for level, lines in levels.items() for line in lines]
    return (*lines, *of_functions(view.functions, view.vectors))


@dataclass(frozen=True, slots=True)
class _Emitted:
    """The mods as functions, and the loop bounds."""

    hoisting: Hoisting
    bounds: Bounds | None
    score_lines: tuple[str, ...]
    mask_lines: tuple[str, ...]
    score_call: str | None
    mask_call: str | None
    scale: str
    elements: tuple[Element, ...]
    reads_columns: bool

    @property
    def inputs(self) -> frozenset[Input]:
        return frozenset(self.hoisting.inputs).union(*(e.inputs for e in self.elements))

    @property
    def helpers(self) -> frozenset[str]:
        return frozenset(self.hoisting.helpers).union(*(e.helpers for e in self.elements))


def _emit(spec: AttentionSpec, plan: KernelPlan, names: tuple[str, ...], taken: set[str]) -> _Emitted:
    score, factor = score_form(spec)
    allowed = mask_form(spec)
    roots = [r for r in (score, factor, allowed) if r is not None]
    ranges = ranges_of(spec)
    bound_roots = [] if ranges is None else range_roots(ranges)
    hoisting = Hoisting(spec, names, roots, taken, bound_roots, by_distance=_by_distance(plan, score))
    bounds = None if ranges is None else tile_bounds(ranges, hoisting)
    lines = hoisting.column_lines(score), hoisting.column_lines(allowed)
    scored = None if score is None else hoisting.element("score_mod", score, spec.score or score)
    mask = None if allowed is None else hoisting.element("mask_mod", allowed, spec.mask or allowed)
    score_call = None
    if scored is not None and score is not None:
        score_call = as_tile(score, scored.call(score="score * score_scale"), f"{_rows_name(plan)}, BLOCK_KV")
    return _Emitted(
        hoisting,
        bounds,
        *lines,
        score_call,
        mask_call=None if mask is None else mask.call(),
        scale="scale" if factor is None else hoisting.scale(factor),
        elements=tuple(e for e in (scored, mask) if e is not None),
        reads_columns=Input.KV_IDX in hoisting.reads(*roots),
    )


def _view(
    spec: AttentionSpec,
    plan: KernelPlan,
    sources: tuple[ModSource, ...],
    names: tuple[str, ...],
    arguments: tuple[Argument, ...],
) -> _Forward:
    emitted = _emit(spec, plan, names, {a.name for a in arguments})
    hoisting, bounds = emitted.hoisting, emitted.bounds
    first_rows = bounds is not None and bounds.first_rows_heaviest
    across = plan.precision == PAIRS and spec.blocks is not Blocks.ALL
    order, q_start = _order(first_rows=first_rows, across=across)
    return _Forward(
        header=header(spec, plan, sources, _launch(plan)),
        constants=(
            *_constants(spec, plan),
            *diagonal_constants(plan.tiles, reads=bool(hoisting.vectors), adds=False),
        ),
        helpers=tuple(sorted(emitted.helpers)),
        fast_tanh=plan.fast_tanh,
        functions=(*(v.function for v in hoisting.vectors), *(e.function for e in emitted.elements)),
        arguments=tuple(a.name for a in arguments),
        vectors=hoisting.vectors,
        by_keys=False,
        head_lines=hoisting.head,
        row_lines=hoisting.row,
        score_column_lines=emitted.score_lines,
        mask_column_lines=emitted.mask_lines,
        rows=_rows_name(plan),
        packed=plan.packed_heads > 1,
        starts_early=False,
        mods_read_rows=Input.Q_IDX in emitted.inputs or (bounds is not None and bounds.reads_rows),
        mods_read_columns=emitted.reads_columns,
        mask_call=emitted.mask_call,
        score_call=emitted.score_call,
        score_scale=emitted.scale,
        **_masks(spec, plan),
        convert_k=spec.k_storage is not spec.q_storage,
        convert_v=spec.v_storage is not spec.q_storage,
        blocks_from_map=spec.blocks is Blocks.MAP,
        bounds=bounds,
        masked="(kv_start < full_first) | (kv_start >= full_end)" if bounds is None else bounds.masked,
        across_heads=across,
        order=order,
        q_start=q_start,
        sinks=spec.has_sinks,
        lse=spec.return_lse,
        rescue_nan=plan.rescue_nan,
        dropout=spec.dropout,
        pairs=plan.precision == PAIRS,
    )


def _masks(spec: AttentionSpec, plan: KernelPlan) -> dict[str, str]:
    """Which elements of a tile exist. Keys are transposed but where they are pairs."""
    key, dim = ("[:, None]", "[None, :]") if plan.precision == PAIRS else ("[None, :]", "[:, None]")
    pad, pad_v = plan.padded_dim != spec.head_dim, plan.padded_dim_v != spec.head_dim_v
    dims_v = " & (dims_v < HEAD_DIM_V)[None, :]" if pad_v else ""
    in_row = "(rows < q_len)[:, None]"
    return {
        "q_mask": in_row + (" & (dims < HEAD_DIM)[None, :]" if pad else ""),
        "k_mask": f"in_range{key}" + (f" & (dims < HEAD_DIM){dim}" if pad else ""),
        "k_mask_whole": f", mask=(dims < HEAD_DIM){dim}, other=0.0" if pad else "",
        "v_mask": f"in_range[:, None]{dims_v}",
        "v_mask_whole": ", mask=(dims_v < HEAD_DIM_V)[None, :], other=0.0" if pad_v else "",
        "out_mask": ("in_rows[:, None]" if plan.packed_heads > 1 else in_row) + dims_v,
    }


def _rows_name(plan: KernelPlan) -> str:
    """The constant that is the number of rows of a tile."""
    return "ROWS" if plan.packed_heads > 1 else "BLOCK_Q"


def _order(*, first_rows: bool, across: bool) -> tuple[str, str]:
    if across:
        return _FIRST_ROWS_OF_ALL_FIRST if first_rows else _LAST_ROWS_OF_ALL_FIRST
    return _FIRST_ROWS_FIRST if first_rows else _LAST_ROWS_FIRST


def _by_distance(plan: KernelPlan, score: Expr | None) -> tuple[Expr, ...]:
    """Parts of the score to compute once a distance: not where the rows of a tile are of several heads."""
    return () if score is None or plan.packed_heads > 1 else reads_by_distance(score)


def _constants(spec: AttentionSpec, plan: KernelPlan) -> tuple[Constant, ...]:
    tiles = plan.tiles
    constants = [
        *_rows(plan),
        Constant("BLOCK_KV", tiles.block_kv, "keys of a step"),
        Constant("PADDED_DIM", plan.padded_dim, "head dimension of q and k, to a power of two"),
        Constant("PADDED_DIM_V", plan.padded_dim_v, "head dimension of v, to a power of two"),
    ]
    if plan.padded_dim != spec.head_dim:
        constants.append(Constant("HEAD_DIM", spec.head_dim, "of which these exist"))
    if plan.padded_dim_v != spec.head_dim_v:
        constants.append(Constant("HEAD_DIM_V", spec.head_dim_v, "of which these exist"))
    if plan.precision != PAIRS:
        constants.append(Constant("PRECISION", f'"{plan.precision}"', "of fp32 matrix products"))
    constants.append(LOG2E)
    if spec.return_lse:
        constants.append(LN2)
    return tuple(constants)


def _rows(plan: KernelPlan) -> tuple[Constant, ...]:
    if plan.packed_heads == 1:
        return (Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a program"),)
    return (
        Constant("BLOCK_Q", plan.head_rows, "query rows of each head of a program"),
        Constant("ROWS", plan.tiles.block_q, "those of all its heads"),
    )


def _launch(plan: KernelPlan) -> tuple[str, ...]:
    heads = "q_heads" if plan.packed_heads == 1 else "q_heads // group"
    return (
        f"Launch cdiv(q_len, BLOCK_Q) * {heads} * batch programs with",
        f"num_warps={plan.tiles.num_warps}, num_stages={plan.tiles.num_stages}.",
    )


def header(
    spec: AttentionSpec, plan: KernelPlan, sources: tuple[ModSource, ...], launch: tuple[str, ...]
) -> str:
    """The docstring of a generated file: what it computes, how to launch it, and the mods it was made of."""
    lines = [
        f'"""Attention forward for {plan.target.name}: {spec.describe()}.',
        "",
        f"Generated by flexc {__version__}. {launch[0]}",
        *launch[1:],
        *source_lines(sources),
        '"""',
    ]
    return "\n".join(line.rstrip() for line in lines)


def source_lines(sources: tuple[ModSource, ...]) -> list[str]:
    """The user's own mods, for the docstring of a generated file."""
    lines: list[str] = []
    for source in sources:
        lines += ["", f"{source.name}, {source.file}:{source.line}", ""]
        text = textwrap.dedent(source.text).rstrip().replace("\\", "\\\\").replace('"""', "'''")
        lines += textwrap.indent(text, "    ").splitlines()
    return lines
