"""Gathers what a generated Hopper file says: the mods in Gluon's words, constants, steps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from flexc.codegen.arguments import Argument, capture_names
from flexc.codegen.blocks import ranges_of
from flexc.codegen.bounds import range_roots, tile_bounds
from flexc.codegen.distance import reads_by_distance
from flexc.codegen.gluon_names import BARRIER, RENAMED
from flexc.codegen.hoisting import Element, Hoisting, of_functions
from flexc.codegen.hopper_arguments import hopper_arguments
from flexc.codegen.hopper_constants import constants_of
from flexc.codegen.hopper_distance import ByDistance, by_distance, function_of
from flexc.codegen.hopper_keys import (
    Keys,
    Vector,
    buffers_of,
    is_idle,
    keys_of,
    lines_in_step,
    lines_of_loads,
    vectors_of,
)
from flexc.codegen.hopper_masks import Side, mask_near, mask_sides
from flexc.codegen.hopper_plan import HopperPlan
from flexc.codegen.hopper_rows import TileRows, tile_rows
from flexc.codegen.hopper_score import hopper_score
from flexc.codegen.hopper_walk import Walk, walk_of
from flexc.codegen.hopper_whereabouts import whereabouts_of
from flexc.codegen.hopper_words import ALL_NAMES, SIGMOID, gluon, mentions, nearer, needed, others, target_of
from flexc.codegen.module import GeneratedKernel, header
from flexc.codegen.preamble import Preamble
from flexc.codegen.render import render
from flexc.ir.expr import Expr
from flexc.ir.graph import ModSource
from flexc.ir.ops import Input
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec, Blocks

ENTRY = "attention_forward"
# Which rows of the heads come first, and where those of a tile start: long tiles early.
_LAST_ROWS_FIRST = (
    "Of those, the last rows come first:\n    under a causal mask they have the most keys.",
    "(q_tiles - 1 - rest // size) * BLOCK_Q",
)
_FIRST_ROWS_FIRST = (
    "Of those, the first rows come first:\n    they have the most keys.",
    "rest // size * BLOCK_Q",
)
_SLOPED = "score * score_scale + gl.fma(kv_on.to(gl.float32), slope + zero, of_first)"
_RISE = "gl.maximum(-slope, 0.0) * to_log2 * (kv_start - kv_first)"  # in base 2, where far keys have more
_WIDTH = 88
"""Of the lines that pass the arguments on; the deepest begin in column 20."""


@dataclass(frozen=True, slots=True)
class _Forward(Preamble):
    """Everything that the template reads. Strings are pieces of Python, booleans are features."""

    renamed: tuple[str, ...]
    argument_lines: tuple[str, ...]
    argument_lines_again: tuple[str, ...]
    whereabouts: tuple[tuple[str, str], ...]
    """The arguments that are read from shared memory where rows are computed again, and how."""
    out_at: str
    """What says where the output lies."""
    head_lines: tuple[str, ...]
    head_lines_again: tuple[str, ...]
    tile_names: tuple[tuple[int, str], ...]
    """Of what is told of a tile, what it is told for."""
    row_lines: tuple[str, ...]
    near_row_lines: tuple[str, ...]
    near_column_lines: tuple[str, ...]
    """Parts of distances, in indices that count from the first key of a step."""
    score_column_lines: tuple[str, ...]
    mask_column_lines: tuple[str, ...]
    rows: TileRows
    reads_heads: bool
    """Something is read of each row's head."""
    mods_read_rows: bool
    mods_read_columns: bool
    columns_again: bool
    """Whether `kv_idx` is read in a step, and where rows are computed again."""
    reads_rows: bool
    mask_call: str | None
    mask_near: str | None
    """The mask's call with its comparisons counted from a thread's first column, where that may be."""
    mask_sides: tuple[Side, ...]
    """The mask, where keys are only compared with rows, and bounds say which comparison decides where."""
    first_short: bool
    """Tiles of queries end with the last row, and the first one begins before the first row."""
    load_start: str
    """Where the rows of a tile start, in the loading warp."""
    load_reads_start: bool
    """Whether it also needs to know where those start that exist."""
    score_call: str | None
    score_scale: str
    row_score: str | None
    """A summand of all scores of a row."""
    to_log2: str
    """The factor of all scores, to base 2."""
    score_lines_in_step: tuple[str, ...]
    """Less what the loading warp computes."""
    mask_lines_in_step: tuple[str, ...]
    staged_lines: tuple[str, ...]
    staged_where_masked: bool
    vectors: tuple[Vector, ...]
    by_distance: ByDistance
    blocks_from_map: bool
    steps_told: bool
    """The loading warp tells of every tile of keys which it is."""
    walk_noted: bool
    """The first and the last keys of a walk are kept for rows that are computed again."""
    told: tuple[str, ...]
    told_keys: bool
    load_lines: tuple[str, ...]
    """What finds the keys of a tile of queries from its coordinates."""
    load_reads_rows: bool
    rows_padded: int
    stretches: int
    """Ranges of the closed form."""
    stretch_lines: tuple[str, ...]
    may_be_blind: bool
    own_lines: tuple[str, ...]
    """What finds the keys of one warpgroup's rows, where these differ by whole tiles."""
    order: str
    q_start: str
    masked: str | None
    """The condition that the mask applies to a tile of keys; None where there is no mask."""
    masked_in_load: str | None
    sinks: bool
    lse: bool
    dropout: bool
    whole: str
    """What the weights of a row add up to: of those that dropout keeps, less are left."""
    rescue_nan: bool
    sums_in_parts: bool
    values_late: bool
    lean: bool
    threads_release: bool
    turns: bool
    turns_by_scores: bool
    short: bool
    slope: str | None
    """What scores rise by from key to key, where that and `row_score` are all of the score_mod."""
    scores_begun: bool
    """Sums of products begin with what the slope and the shift add to them."""
    whole_score: str
    """A tile of scores with the slope's part, and by how much other keys' may be larger."""
    rise: str
    fixed: bool
    """What is taken from the scores of a row is the same in all steps: it is `bounded` or `guessed`."""
    walk: Walk | None
    """Pieces of the kernel whose programs walk; None where they have roles."""
    bounded: bool
    guessed: bool
    """That was chosen by the first tile of keys, and may prove wrong."""
    lazy_max: bool
    polynomials: bool
    """Some powers of two are computed as polynomials."""
    out_through_q: bool
    tail: str
    """Where the second part of the head dimension begins; empty where there is none."""
    tail_v: str
    one_q: bool
    q_now: str
    q_before: str
    """Which buffer has the query rows of a tile, and of the one before."""
    buffer_lines: tuple[str, ...]
    consumers: tuple[int, ...]
    worker_warps: tuple[int, ...]
    worker_registers: tuple[int, ...]


def hopper_module(spec: AttentionSpec, plan: HopperPlan, sources: tuple[ModSource, ...]) -> GeneratedKernel:
    """The file of a Hopper forward kernel."""
    names = capture_names(spec.captures, ALL_NAMES)
    arguments = hopper_arguments(spec, plan, names)
    view = _view(spec, plan, sources, names, arguments)
    text = render("hopper_walk.py.jinja" if plan.walks else "hopper_forward.py.jinja", view)
    return GeneratedKernel(text, ENTRY, arguments, plan, _placement(view))


def _view(
    spec: AttentionSpec,
    plan: HopperPlan,
    sources: tuple[ModSource, ...],
    names: tuple[str, ...],
    arguments: tuple[Argument, ...],
) -> _Forward:
    ranges = ranges_of(spec)
    rows = tile_rows(plan)
    found = hopper_score(spec, packed=plan.packed_heads > 1, by_row=not plan.bounded and not plan.walks)
    form, parts, factor, allowed = found.form, found.near, found.factor, found.allowed
    slope = found.slope if plan.guessed else None
    score = form.score if slope is None else None
    roots = [r for r in (score, slope, factor, form.row, form.size, allowed) if r is not None]
    distances = () if score is None or spec.packed_heads > 1 else reads_by_distance(score)
    bound_roots = [] if ranges is None else range_roots(ranges)
    hoisting = Hoisting(
        spec, names, roots, {a.name for a in arguments} | ALL_NAMES, bound_roots, by_distance=distances
    )
    shared = by_distance(hoisting.vectors, plan.tiles.block_kv, is_by_keys=False, waits=plan.consumers > 2)
    bounds = None if ranges is None else tile_bounds(ranges, hoisting)
    score_lines = hoisting.column_lines(score)
    mask_lines = hoisting.column_lines(allowed)
    scored = None if score is None else hoisting.element("score_mod", score, spec.score or score)
    mask = None if allowed is None else hoisting.element("mask_mod", allowed, spec.mask or allowed)
    scale = "scale" if factor is None else hoisting.scale(factor)
    first_rows = bounds is not None and bounds.first_rows_heaviest
    near = frozenset(hoisting.bound[part] for part in parts if part in hoisting.bound)
    elements = [e for e in (scored, mask) if e is not None]
    inputs = frozenset[Input]().union(*(e.inputs for e in elements)) | hoisting.inputs
    helpers = frozenset[str]().union(*(e.helpers for e in elements)) | hoisting.helpers
    keys = keys_of(spec, plan, bounds)
    first_short = bounds is not None and not first_rows and not plan.walks
    near_mask = None if mask is None or allowed is None else mask_near(allowed, mask, hoisting)
    vectors = vectors_of(hoisting, near, mask_lines, elements)
    staged = needed(gluon((*score_lines, *mask_lines)), [v.name for v in vectors])
    load_lines = lines_of_loads(hoisting, keys, staged)
    sides = () if allowed is None or keys.steps_told else mask_sides(allowed, keys.masked, hoisting)
    decided = [s.masked for s in sides] or [keys.masked or ""]
    own_lines = tuple(line for line in keys.own_lines if not is_idle(target_of(line), decided))
    score_steps = lines_in_step(others(score_lines, near), vectors, elements)
    mask_steps = lines_in_step(mask_lines, vectors, elements)
    slope_of = None if slope is None else gluon([hoisting.value(slope)])[0]
    heads = gluon(hoisting.head)
    where = whereabouts_of(spec, plan, arguments)
    to_log2 = "LOG2E" if form.factor == 1 else f"LOG2E * {form.factor!r}"
    to_log2 += "" if form.size is None else f" * {hoisting.bound[form.size]}"
    mods = [*hoisting.row, scale, to_log2, *(e.call() for e in elements), *nearer(score_lines, near, "", "")]
    mods += [*shared.calls, slope_of or ""]
    head_lines = needed(heads, [*mods, *score_steps, *mask_steps, *keys.own_lines])
    of_tile = [*head_lines, *mods, *score_steps, *mask_steps, *_read_of_tile(spec, keys)]
    of_tile += ["q_start"] if hoisting.row or Input.Q_IDX in inputs or shared.vectors else []
    buffers = buffers_of(plan, keys.steps_told, vectors)
    emitted = [*hoisting.head, *hoisting.row, *score_lines, *mask_lines, scale]
    emitted += [line for e in elements for line in (*e.function.statements, e.function.result)]
    if any(SIGMOID in line for line in emitted):
        helpers |= {"sigmoid"}
    return _Forward(
        header=header(spec, plan, sources, rows.launch),
        renamed=(*RENAMED, BARRIER) if keys.steps_told or vectors else RENAMED,
        constants=constants_of(spec, plan, keys),
        helpers=tuple(sorted(helpers)),
        fast_tanh=plan.fast_tanh,
        functions=(*(v.function for v in shared.vectors), *(function_of(e.function) for e in elements)),
        by_distance=shared,
        argument_lines=tuple(textwrap.wrap(", ".join(a.name for a in arguments) + ",", _WIDTH)),
        argument_lines_again=tuple(textwrap.wrap(", ".join(where.arguments) + ",", _WIDTH)),
        whereabouts=where.held,
        out_at=where.out_at,
        head_lines=head_lines,
        head_lines_again=needed(heads, [*mods, *score_lines, *mask_lines]),
        row_lines=others(gluon(hoisting.row), near),
        near_row_lines=nearer(gluon(hoisting.row), near, "q_idx", "q_near"),
        near_column_lines=nearer(gluon(score_lines), near, "kv_idx", "kv_near"),
        score_column_lines=others(gluon(score_lines), near),
        mask_column_lines=gluon(mask_lines),
        mods_read_rows=Input.Q_IDX in inputs,
        reads_rows=Input.Q_IDX in inputs or bool(hoisting.row) or spec.dropout,
        rows=rows,
        reads_heads=rows.packed and mentions("h", of_tile),
        mods_read_columns=_reads_columns(
            [*score_steps, *mask_steps], [e for e in elements if not (e is mask and near_mask)]
        ),
        columns_again=bool(shared.vectors)
        or _reads_columns([*others(score_lines, near), *mask_lines], elements),
        mask_call=None if mask is None else mask.call(),
        mask_near=near_mask,
        mask_sides=sides,
        first_short=first_short,
        load_start="tile_start" if first_short else "q_start",
        load_reads_start=mentions("q_start", load_lines)
        or bounds is None
        or bounds.count > 1
        or bounds.reads_rows,
        score_call=None
        if scored is None or score is None
        else _as_tile(score, scored.call(score="score * score_scale")),
        score_scale=gluon([scale])[0],
        row_score=None if form.row is None else hoisting.bound[form.row],
        to_log2=to_log2,
        score_lines_in_step=score_steps,
        mask_lines_in_step=mask_steps,
        staged_lines=staged,
        staged_where_masked=all(v.of_mask for v in vectors) and keys.steps_told and bool(vectors),
        vectors=vectors,
        blocks_from_map=spec.blocks is Blocks.MAP,
        tile_names=tuple(
            (n, name)
            for n, name in enumerate(keys.told)
            if name == "b" or mentions(name, of_tile) or (n > 2 and not is_idle(name, decided))
        ),
        steps_told=keys.steps_told,
        walk_noted=plan.rescue_nan and keys.steps_told and spec.blocks is not Blocks.MAP,
        told=keys.told,
        told_keys=keys.told_keys,
        load_lines=load_lines,
        load_reads_rows=bounds is not None and bounds.reads_rows,
        rows_padded=1 << (plan.head_rows - 1).bit_length(),
        stretches=0 if bounds is None else bounds.count,
        stretch_lines=() if bounds is None else gluon(bounds.stretch_lines),
        may_be_blind=spec.blocks is Blocks.RANGES,
        own_lines=own_lines,
        order=_FIRST_ROWS_FIRST[0] if first_rows else _LAST_ROWS_FIRST[0],
        q_start=_FIRST_ROWS_FIRST[1] if first_rows else _LAST_ROWS_FIRST[1],
        masked=None if mask is None else keys.masked,
        masked_in_load=keys.masked_in_load,
        sinks=spec.has_sinks,
        lse=spec.return_lse,
        dropout=spec.dropout,
        whole="survivors_weight" if spec.dropout else "1.0",
        rescue_nan=plan.rescue_nan,
        sums_in_parts=plan.sums_in_parts,
        values_late=plan.values_late,
        lean=plan.lean,
        threads_release=plan.threads_release,
        turns=plan.turns,
        turns_by_scores=plan.turns_by_scores,
        short=plan.short,
        slope=slope_of,
        scores_begun=slope_of is not None and not keys.steps_told,
        whole_score="score" if slope_of is None else _SLOPED,
        rise="0.0" if slope_of is None or keys.steps_told else _RISE,
        fixed=plan.bounded or plan.guessed,
        walk=walk_of(sides, plan.tiles.num_stages) if plan.walks else None,
        bounded=plan.bounded,
        guessed=plan.guessed,
        lazy_max=plan.lazy_max,
        polynomials=plan.polynomials,
        out_through_q=plan.out_through_q,
        tail="PADDED_DIM" if plan.tails[0] else "",
        tail_v="PADDED_DIM_V" if plan.tails[1] else "",
        one_q=plan.q_tiles == 1,
        q_now="which" if plan.q_tiles == 1 else "which * Q_TILES + taken % Q_TILES",
        q_before="which" if plan.q_tiles == 1 else "which * Q_TILES + (taken + 1) % Q_TILES",
        buffer_lines=tuple(textwrap.wrap(", ".join(buffers) + ",", _WIDTH)),
        consumers=tuple(range(plan.consumers)),
        worker_warps=(4,) * (plan.consumers - 1) + (1,),
        worker_registers=(plan.registers[0],) * (plan.consumers - 1) + (plan.registers[1],),
    )


def _reads_columns(lines: Sequence[str], elements: Sequence[Element]) -> bool:
    return mentions("kv_idx", [*lines, *(a for e in elements for a in e.arguments)])


def _read_of_tile(spec: AttentionSpec, keys: Keys) -> list[str]:
    """What a warpgroup reads of a tile's place besides the mods."""
    own = ["q_start"] if keys.own_lines else []
    return [*own, *(["h"] if spec.has_sinks else []), *(["b", "h", "q_start"] if spec.dropout else [])]


def _placement(view: _Forward) -> tuple[str, ...]:
    levels = {
        "head": view.head_lines,
        "row": (*view.row_lines, *view.near_row_lines),
        "column": (*view.near_column_lines, *view.score_column_lines, *view.mask_column_lines),
    }
    lines = [f"once a {level}: {line}" for level, lines in levels.items() for line in lines]
    return (*lines, *of_functions(view.functions, view.by_distance.vectors))


def _as_tile(score: Expr, call: str) -> str:
    """A score that does not read both row and column, or the score itself, is spread over the tile."""
    return call if place(score)[score] is Placement.ELEMENT else f"{call} + zero"
