"""Gathers what the generated files of a backward say, one file a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.arguments import Argument, capture_names
from flexc.codegen.backward_arguments import backward_arguments
from flexc.codegen.backward_captured import CapturedView, captured_view
from flexc.codegen.backward_form import Form, adds_exactly, backward_form
from flexc.codegen.backward_header import PADDED_TO, header
from flexc.codegen.backward_order import first_tiles
from flexc.codegen.backward_rows import PairsView, RowsView, SumsView, pairs_view, rows_view, sums_view
from flexc.codegen.backward_spec import PIECE, BackwardSpec, Entry
from flexc.codegen.bounds import Bounds, range_roots, tile_bounds
from flexc.codegen.diagonals import diagonal_constants
from flexc.codegen.distance import reads_by_distance
from flexc.codegen.hoisting import Element, Hoisting, Vector, as_tile, of_functions
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.plan import KernelPlan
from flexc.codegen.preamble import LOG2E, Constant, Preamble
from flexc.codegen.render import render
from flexc.codegen.scatter import ScatterForm, Sum
from flexc.codegen.scatter_code import ScatterCode, first_place, scatter_code
from flexc.ir.build import input_
from flexc.ir.expr import inputs_of
from flexc.ir.graph import ModSource
from flexc.ir.ops import Input
from flexc.ir.spec import Blocks

_TEMPLATE = {
    Entry.ROWS: "backward_rows.py.jinja",
    Entry.PAIRS: "backward_pairs.py.jinja",
    Entry.KV: "backward_kv.py.jinja",
    Entry.Q: "backward_q.py.jinja",
    Entry.FUSED: "backward_kv.py.jinja",
    Entry.Q_SUMS: "backward_q_sums.py.jinja",
    Entry.CAPTURED: "backward_captured.py.jinja",
}


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A gradient of a captured tensor, in pieces of Python. `sum` is a `Sum`."""

    name: str
    pointer: str
    exactly: bool
    sum: str
    keeps_sum: bool
    has_places: bool
    first_place: str
    """Where in memory the sums of a head begin, by row or from distance 0 on."""
    shares: bool
    """Whether pairs may share an element."""
    value: str
    visible: str
    """Which pairs of a tile it may be added up for."""
    at: str


@dataclass(frozen=True, slots=True)
class _Backward(Preamble):
    """Everything that the templates of the two large kernels read."""

    entry: str
    sliced: bool
    """Whether a program writes gradients of some head dimensions only, and reads operands piece by piece."""
    pairs: bool
    """Whether operands are pairs of fp16 numbers."""
    parted: bool
    """Whether a step has parts that the compiler does not mix, so that fewer registers are live."""
    fused: bool
    """Whether this kernel adds to the sums of dQ as well."""
    finds_delta: bool
    has_grad_lse: bool
    arguments: tuple[str, ...]
    head_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    column_lines: tuple[str, ...]
    moving_lines: tuple[str, ...]
    """What is computed a step: once a column where a program keeps its rows, else once a row."""
    vectors: tuple[Vector, ...]
    by_keys: bool
    """Whether tiles have keys as their rows."""
    mods_read_rows: bool
    mods_read_columns: bool
    mask_call: str | None
    score_call: str | None
    score_result: str
    """The name of the modified score: another one where the gradient reads the score before it."""
    score_scaled: bool
    score_scale: str | None
    to_log2: str
    dot_scale: str
    final_scale: str | None
    scale_per_head: bool
    grad_call: str | None
    guard: bool
    q_mask: str
    k_mask: str
    k_mask_whole: str
    v_mask: str
    v_mask_whole: str
    dout_mask: str
    sums_mask: str
    dim: str
    dim_v: str
    convert_k: bool
    convert_v: bool
    blocks_from_map: bool
    bounds: Bounds | None
    masked: str | None
    """Where the mask applies to a tile, as a condition; None where there are no blocks to look at."""
    across_heads: bool
    """Whether tiles of all heads with as much to visit are neighbours. Else those of a head are."""
    first_start: str
    """Where the tile begins that the program keeps."""
    order: str
    rescue_nan: bool
    dropout: bool
    repairs: bool
    scatters: tuple[_Scatter, ...]
    reads_live: bool
    """Whether gradients are added up for the pairs that are `live`."""
    adds_exactly: bool
    adds_shared: bool
    """Whether pairs of a tile may share an element."""
    adds_diagonals: bool


def backward_module(
    backward: BackwardSpec, entry: Entry, plan: KernelPlan, sources: tuple[ModSource, ...]
) -> GeneratedKernel:
    """The file of one kernel of a backward."""
    names = capture_names(backward.forward.captures)
    arguments = backward_arguments(backward, entry, names)
    view: RowsView | PairsView | SumsView | CapturedView | _Backward
    placement: tuple[str, ...] = ()
    if entry is Entry.ROWS:
        view = rows_view(backward, plan, arguments)
    elif entry is Entry.PAIRS:
        view = pairs_view(backward, plan, arguments)
    elif entry is Entry.Q_SUMS:
        view = sums_view(backward, plan, names, arguments)
    elif entry is Entry.CAPTURED:
        view = captured_view(backward, plan, names, arguments)
    else:
        view = _view(backward, entry, plan, sources, names, arguments)
        placement = _placement(view)
    return GeneratedKernel(render(_TEMPLATE[entry], view), entry.value, arguments, plan, placement)


def _placement(view: _Backward) -> tuple[str, ...]:
    levels = {"head": view.head_lines, "row": view.row_lines, "column": view.column_lines}
    lines = [f"once a {level}: {line}" for level, lines in levels.items() for line in lines]
    lines += [f"once a step: {line}" for line in view.moving_lines]
    return (*lines, *of_functions(view.functions, view.vectors))


@dataclass(frozen=True, slots=True)
class _Emitted:
    """The mods as functions, and the loop bounds."""

    hoisting: Hoisting
    bounds: Bounds | None
    moving: tuple[str, ...]
    score: Element | None
    grad: Element | None
    mask: Element | None
    scale: str | None
    scatters: tuple[ScatterCode, ...]

    @property
    def elements(self) -> list[Element]:
        found = [self.score, self.grad, self.mask]
        for _, *functions in self.scatters:
            found += functions
        return [e for e in found if e is not None]


def _emit(
    backward: BackwardSpec, entry: Entry, form: Form, names: tuple[str, ...], taken: set[str]
) -> _Emitted:
    spec, ranges = backward.forward, backward.ranges(entry)
    columns_stay = entry.axes.by_keys
    roots = [] if ranges is None else range_roots(ranges, entry.axes)
    once = reads_by_distance(*form.of_scores)
    hoisting = Hoisting(spec, names, form.roots, taken, roots, columns_stay=columns_stay, by_distance=once)
    bounds = None if ranges is None else tile_bounds(ranges, hoisting, entry.axes)
    moves = hoisting.row_lines if columns_stay else hoisting.column_lines
    moving = tuple(line for root in form.roots for line in moves(root))
    score = (
        None if form.score is None else hoisting.element("score_mod", form.score, spec.score or form.score)
    )
    grad = None if form.grad is None else hoisting.element("score_mod_grad", form.grad, form.grad)
    mask = None if form.mask is None else hoisting.element("mask_mod", form.mask, spec.mask or form.mask)
    scatters = tuple(scatter_code(hoisting, scatter) for scatter in form.scatters)
    scale = None
    if form.score is not None:
        scale = "scale" if form.factor is None else hoisting.scale(form.factor)
    return _Emitted(hoisting, bounds, moving, score, grad, mask, scale, scatters)


def _view(
    backward: BackwardSpec,
    entry: Entry,
    plan: KernelPlan,
    sources: tuple[ModSource, ...],
    names: tuple[str, ...],
    arguments: tuple[Argument, ...],
) -> _Backward:
    spec = backward.forward
    form = backward_form(backward, scatters=entry.axes.by_keys)
    emitted = _emit(backward, entry, form, names, {a.name for a in arguments})
    hoisting, elements, bounds = emitted.hoisting, emitted.elements, emitted.bounds
    reads_kept = bounds is not None and bounds.reads_rows
    inputs = frozenset[Input]().union(*(e.inputs for e in elements)) | hoisting.inputs
    helpers = frozenset[str]().union(*(e.helpers for e in elements)) | hoisting.helpers
    reads_score = any(Input.SCORE in inputs_of(g) for g in form.gradients)
    score_call = _score_call(form, emitted, entry, scaled=reads_score)
    mentions = "score_scale" in (score_call or "") or reads_score or form.factor is not None
    adds_diagonals = any(s.sum is Sum.DIAGONAL for s in form.scatters)
    per_head = entry.axes.by_keys and not form.factor_is_global
    pad, pad_v = plan.padded_dim != spec.head_dim, plan.padded_dim_v != spec.head_dim_v
    # Those that repair are fewer than tiles are.
    across = backward.pairs and not backward.repairs and backward.blocks(entry) is not Blocks.ALL
    return _Backward(
        header=header(backward, entry, plan, sources),
        constants=(
            *_constants(backward, plan),
            *diagonal_constants(plan.tiles, reads=bool(hoisting.vectors), adds=adds_diagonals),
        ),
        helpers=tuple(sorted(helpers)),
        fast_tanh=plan.fast_tanh,
        functions=(*(v.function for v in hoisting.vectors), *(e.function for e in elements)),
        entry=entry.value,
        sliced=backward.slices > 1,
        pairs=backward.pairs,
        parted=backward.pairs and entry is Entry.KV,
        fused=entry is Entry.FUSED,
        finds_delta=backward.finds_delta,
        has_grad_lse=backward.has_grad_lse,
        arguments=tuple(a.name for a in arguments),
        head_lines=hoisting.head,
        row_lines=hoisting.row,
        column_lines=hoisting.column,
        moving_lines=emitted.moving,
        vectors=hoisting.vectors,
        by_keys=entry.axes.by_keys,
        mods_read_rows=Input.Q_IDX in inputs or (reads_kept and not entry.axes.by_keys),
        mods_read_columns=Input.KV_IDX in inputs
        or Input.KV_IDX in hoisting.reads(*form.roots)
        or (reads_kept and entry.axes.by_keys),
        mask_call=None if emitted.mask is None else emitted.mask.call(),
        score_call=score_call,
        score_result="modified" if reads_score else "score",
        score_scaled=reads_score,
        score_scale=emitted.scale if mentions else None,
        to_log2="scale * LOG2E" if form.score is None else "LOG2E",
        dot_scale="scale" if form.factor is None else "score_scale",
        final_scale=None if per_head else emitted.scale or "scale",
        scale_per_head=per_head,
        grad_call=None if emitted.grad is None else emitted.grad.call(),
        guard=emitted.grad is not None,
        **_masks(entry, pad=pad, pad_v=pad_v),
        sums_mask=", mask=(dims < HEAD_DIM)[None, :]" if pad else "",
        dim="HEAD_DIM" if pad else "PADDED_DIM",
        dim_v="HEAD_DIM_V" if pad_v else "PADDED_DIM_V",
        convert_k=spec.k_storage is not spec.q_storage,
        convert_v=spec.v_storage is not spec.q_storage,
        blocks_from_map=backward.blocks(entry) is Blocks.MAP,
        bounds=bounds,
        masked=_masked(backward, entry, bounds),
        across_heads=across,
        **first_tiles(entry, bounds, across=across),
        rescue_nan=plan.rescue_nan,
        dropout=spec.dropout,
        repairs=backward.repairs,
        starts_early=backward.repairs and plan.target.has_early_starts,
        scatters=_scatters(backward, form, emitted, names),
        reads_live=any(_visible(backward, s) == "live" or s.sum is Sum.NOTHING for s in form.scatters),
        adds_exactly=any(adds_exactly(backward, form, s.slot) for s in form.scatters),
        adds_shared=any(s.sum is Sum.NOTHING and not s.meets_once for s in form.scatters),
        adds_diagonals=adds_diagonals,
    )


def _masked(backward: BackwardSpec, entry: Entry, bounds: Bounds | None) -> str | None:
    start = f"{entry.axes.walked}_start"
    found = []
    if bounds is not None:
        found.append(bounds.masked)
    elif backward.blocks(entry) is Blocks.MAP:
        found.append(f"({start} < full_first) | ({start} >= full_end)")
    if entry is Entry.FUSED:
        found = [text if "|" in text else f"({text})" for text in found]  # `|` binds more tightly than `<`
        found.append("hangs_over")
    return " | ".join(found) or None


def _scatters(
    backward: BackwardSpec, form: Form, emitted: _Emitted, names: tuple[str, ...]
) -> tuple[_Scatter, ...]:
    return tuple(
        _Scatter(
            name=emitted.hoisting.fresh(f"{names[scatter.slot]}_sum"),
            pointer=f"sums_{n}_ptr" if at is None else f"{names[scatter.slot]}_grad_ptr",
            exactly=adds_exactly(backward, form, scatter.slot),
            sum=scatter.sum.value,
            keeps_sum=scatter.sum in (Sum.HEAD, Sum.COLUMN),
            has_places=at is None,
            first_place=first_place(scatter),
            shares=not scatter.meets_once,
            value=value.call(),
            visible=_visible(backward, scatter),
            at="" if at is None else at.call(),
        )
        for n, (scatter, value, at) in enumerate(emitted.scatters)
    )


def _visible(backward: BackwardSpec, scatter: ScatterForm) -> str:
    """`live`, or less where no mask hides any pair and the score's own gradient is added up."""
    own = scatter.value is input_(Input.GRAD) and backward.forward.mask is None
    return "in_columns[:, None]" if own and backward.slices == 1 else "live"


def _score_call(form: Form, emitted: _Emitted, entry: Entry, *, scaled: bool) -> str | None:
    if emitted.score is None or form.score is None:
        return None
    call = emitted.score.call(score="score" if scaled else "score * score_scale")
    return as_tile(form.score, call, "BLOCK_KV, BLOCK_Q" if entry.axes.by_keys else "BLOCK_Q, BLOCK_KV")


def _masks(entry: Entry, *, pad: bool, pad_v: bool) -> dict[str, str]:
    """Which elements of a tile exist. Keys and values are transposed where a program keeps its rows."""
    dims = " & (dims < HEAD_DIM)[None, :]" if pad else ""
    dims_v = " & (dims_v < HEAD_DIM_V)[None, :]" if pad_v else ""
    rows = {"q_mask": f"in_rows[:, None]{dims}", "dout_mask": f"in_rows[:, None]{dims_v}"}
    if entry.axes.by_keys:
        columns = {"k_mask": f"in_columns[:, None]{dims}", "v_mask": f"in_columns[:, None]{dims_v}"}
        return {**rows, **columns, "k_mask_whole": "", "v_mask_whole": ""}
    down = " & (dims < HEAD_DIM)[:, None]" if pad else ""
    down_v = " & (dims_v < HEAD_DIM_V)[:, None]" if pad_v else ""
    return {
        **rows,
        "k_mask": f"in_columns[None, :]{down}",
        "v_mask": f"in_columns[None, :]{down_v}",
        "k_mask_whole": ", mask=(dims < HEAD_DIM)[:, None], other=0.0" if pad else "",
        "v_mask_whole": ", mask=(dims_v < HEAD_DIM_V)[:, None], other=0.0" if pad_v else "",
    }


def _constants(backward: BackwardSpec, plan: KernelPlan) -> tuple[Constant, ...]:
    spec = backward.forward
    if backward.slices > 1:
        return (
            Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a tile"),
            Constant("BLOCK_KV", plan.tiles.block_kv, "keys of a tile"),
            Constant("HEAD_DIM", spec.head_dim, "head dimension of q and k"),
            Constant("HEAD_DIM_V", spec.head_dim_v, "head dimension of v"),
            Constant("PADDED_DIM", plan.padded_dim, "head dimensions of a program"),
            Constant("PADDED_DIM_V", plan.padded_dim_v, "the same of v"),
            Constant("PIECE", PIECE, "head dimensions of operands that are in registers at a time"),
            Constant("SLICES", backward.slices, "programs that share the head dimensions"),
            Constant("PRECISION", f'"{plan.precision}"', "of fp32 matrix products"),
            PADDED_TO,
            LOG2E,
        )
    constants = [
        Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a tile"),
        Constant("BLOCK_KV", plan.tiles.block_kv, "keys of a tile"),
        Constant("PADDED_DIM", plan.padded_dim, "head dimension of q and k, to a power of two"),
        Constant("PADDED_DIM_V", plan.padded_dim_v, "head dimension of v, to a power of two"),
    ]
    if plan.padded_dim != spec.head_dim:
        constants.append(Constant("HEAD_DIM", spec.head_dim, "of which these exist"))
    if plan.padded_dim_v != spec.head_dim_v:
        constants.append(Constant("HEAD_DIM_V", spec.head_dim_v, "of which these exist"))
    if not backward.pairs:
        constants.append(Constant("PRECISION", f'"{plan.precision}"', "of fp32 matrix products"))
    return (*constants, PADDED_TO, LOG2E)
