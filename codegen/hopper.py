"""Gathers what a generated Hopper file says: the mods in Gluon's words, constants, arguments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexc.codegen.arguments import RESERVED, Argument, Source, capture_names, forward_arguments
from flexc.codegen.blocks import ranges_of
from flexc.codegen.bounds import Bounds, range_roots, tile_bounds
from flexc.codegen.gluon_names import NAMES, RENAMED
from flexc.codegen.hoisting import Element, Function, Hoisting, mask_form, score_form
from flexc.codegen.hopper_plan import ROWS, HopperPlan
from flexc.codegen.module import Constant, GeneratedKernel, header
from flexc.codegen.nearness import near_form
from flexc.codegen.render import render
from flexc.ir.expr import Expr, topological
from flexc.ir.graph import ModSource
from flexc.ir.ops import Input
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import Storage

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
_READ_BY_LOADS = ("kv_first", "kv_end")
_HAS_KEYS = {
    Blocks.ALL: None,
    Blocks.RANGES: "kv_first < kv_end",
    Blocks.MAP: "first_stretch < end_stretch",
}
# Every name that the template uses.
ALL_NAMES = RESERVED | frozenset({
    "gluon", "gl", "tma", "mbarrier", "fence_async_shared", "mma_v2", "warpgroup_mma",
    "warpgroup_mma_wait", "getattr", "CONSUMERS", "ROWS", "STAGES", "Q_BYTES", "K_BYTES", "V_BYTES",
    "L2_KEYS", "OPERAND", "FEW_KEYS", "FEW_DIMS", "place_of", "load_tiles", "attend", "attend_again",
    "fetch", "sigmoid", "batch", "tile", "tiles", "heads", "head", "together", "first", "size", "rest",
    "step", "turn", "slot", "other", "before", "v_turn", "begin", "back", "done", "fresh", "i",
    "kv_last", "first_row", "zero", "alpha", "share", "new_max", "shift", "which", "lost", "nothing",
    "q_near", "kv_near", "again", "again_max", "again_sum", "seen", "keep", "inside", "layout", "dim",
    "counter_ptr", "taken", "tile_smem", "tile_ready", "tile_free", "one_layout", "score_layout",
    "acc_layout", "p_layout", "row_layout", "acc_row_layout", "column_layout", "left_layout", "right_layout",
    "q_tail", "out_tail", "p_tail", "acc_tail", "again_tail", "acc_tail_layout", "acc_tail_row_layout",
    "p_tail_layout", "TAIL_DIM", "TAIL_DIM_V",
    *(f"{tensor}_{part}" for tensor in ("q", "k", "v", "out") for part in ("desc", "smem", "ready", "free")),
    *(f"{tensor}_tail_{part}" for tensor in ("q", "k", "v", "out") for part in ("desc", "smem")),
    *NAMES,
})  # fmt: skip
_WIDTH = 88
"""Of the lines that pass the arguments on; the deepest begin in column 20."""
_LAUNCH = (
    "Launch any number of programs: they share cdiv(q_len, BLOCK_Q) * q_heads * batch",
    "tiles. num_warps=4; the roles that are not the program's own have warps besides.",
)
_SIGMOID = "tl.sigmoid("
_ELEMENT = {Storage.BF16: "gl.bfloat16", Storage.FP16: "gl.float16"}


@dataclass(frozen=True, slots=True)
class _Forward:
    """Everything that the template reads. Strings are pieces of Python, booleans are features."""

    header: str
    renamed: tuple[str, ...]
    constants: tuple[Constant, ...]
    helpers: tuple[str, ...]
    fast_tanh: bool
    functions: tuple[Function, ...]
    argument_lines: tuple[str, ...]
    head_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    near_row_lines: tuple[str, ...]
    near_column_lines: tuple[str, ...]
    """Parts of distances, in indices that count from the first key of a step."""
    score_column_lines: tuple[str, ...]
    mask_column_lines: tuple[str, ...]
    mods_read_rows: bool
    mods_read_columns: bool
    reads_rows: bool
    mask_call: str | None
    score_call: str | None
    score_scale: str
    blocks_from_map: bool
    bounds_lines: tuple[str, ...]
    """What finds the keys of a tile from its coordinates, and the part that the loading warp needs."""
    load_lines: tuple[str, ...]
    order: str
    q_start: str
    has_keys: str | None
    """The condition that a tile has keys at all; None where every one does."""
    masked: str | None
    """The condition that the mask applies to a tile of keys; None where there is no mask."""
    sinks: bool
    lse: bool
    dropout: bool
    whole: str
    """What the weights of a row add up to: of those that dropout keeps, less are left."""
    rescue_nan: bool
    out_through_q: bool
    tail: str
    """Where the second part of the head dimension begins; empty where there is none."""
    tail_v: str
    buffers: str
    consumers: tuple[int, ...]
    worker_warps: tuple[int, ...]
    worker_registers: tuple[int, ...]


def hopper_module(spec: AttentionSpec, plan: HopperPlan, sources: tuple[ModSource, ...]) -> GeneratedKernel:
    """The file of a Hopper forward kernel."""
    names = capture_names(spec.captures, ALL_NAMES)
    arguments = hopper_arguments(spec, plan, names)
    view = _view(spec, plan, sources, names, arguments)
    text = render("hopper_forward.py.jinja", view)
    return GeneratedKernel(text, ENTRY, arguments, plan, _placement(view))


def hopper_arguments(spec: AttentionSpec, plan: HopperPlan, names: tuple[str, ...]) -> tuple[Argument, ...]:
    """Those of the portable kernel, the batch, and a TMA descriptor each of q, k, v and out.

    A descriptor's type says its block: batch, head, rows, columns. Its value is made from the tensor.
    """
    keys = plan.tiles.block_kv
    dims, dims_v = (
        (spec.head_dim, plan.padded_dim, plan.tails[0]),
        (spec.head_dim_v, plan.padded_dim_v, plan.tails[1]),
    )
    tensors = (
        ("q", Source.Q_DESCRIPTOR, ROWS, dims),
        ("k", Source.K_DESCRIPTOR, keys, dims),
        ("v", Source.V_DESCRIPTOR, keys, dims_v),
        ("out", Source.OUT_DESCRIPTOR, ROWS, dims_v),
    )
    descriptors = []
    for name, source, rows, (dim, whole, tail) in tensors:
        for part, columns in ((f"{name}_desc", whole - tail), (f"{name}_tail_desc", tail)):
            if columns:
                block = f"{spec.q_storage.value}[1, 1, {rows}, {columns}]"
                descriptors.append(
                    Argument(part, f"tensordesc<{block},{_layout(columns)}>", source, dimension=dim)
                )
    ranges = ranges_of(spec)
    return (
        *forward_arguments(spec, names, [] if ranges is None else range_roots(ranges)),
        Argument("batch", "i32", Source.BATCH),
        Argument("counter_ptr", "*i32", Source.COUNTER),
        *descriptors,
    )


def _layout(columns: int) -> str:
    """Of a block in shared memory: rows are swizzled in up to 128 bytes."""
    return f"NVMMASharedLayout(swizzle_byte_width={min(128, 2 * columns)}, element_bitwidth=16, rank=2)"


def _view(
    spec: AttentionSpec,
    plan: HopperPlan,
    sources: tuple[ModSource, ...],
    names: tuple[str, ...],
    arguments: tuple[Argument, ...],
) -> _Forward:
    score, factor = score_form(spec)
    allowed = mask_form(spec)
    score, parts = _near(score, allowed)
    roots = [r for r in (score, factor, allowed) if r is not None]
    ranges = ranges_of(spec)
    bound_roots = [] if ranges is None else range_roots(ranges)
    hoisting = Hoisting(spec, names, roots, {a.name for a in arguments} | ALL_NAMES, bound_roots)
    bounds = None if ranges is None else _bounds(tile_bounds(ranges, hoisting))
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
    emitted = [*hoisting.head, *hoisting.row, *score_lines, *mask_lines, scale]
    emitted += [line for e in elements for line in (*e.function.statements, e.function.result)]
    if any(_SIGMOID in line for line in emitted):
        helpers |= {"sigmoid"}
    return _Forward(
        header=header(spec, plan, sources, _LAUNCH),
        renamed=RENAMED,
        constants=_constants(spec, plan),
        helpers=tuple(sorted(helpers)),
        fast_tanh=plan.fast_tanh,
        functions=tuple(_function(e.function) for e in elements),
        argument_lines=tuple(textwrap.wrap(", ".join(a.name for a in arguments) + ",", _WIDTH)),
        head_lines=_gluon(hoisting.head),
        row_lines=_others(_gluon(hoisting.row), near),
        near_row_lines=_of(_gluon(hoisting.row), near, "q_idx", "q_near"),
        near_column_lines=_of(_gluon(score_lines), near, "kv_idx", "kv_near"),
        score_column_lines=_others(_gluon(score_lines), near),
        mask_column_lines=_gluon(mask_lines),
        mods_read_rows=Input.Q_IDX in inputs,
        reads_rows=Input.Q_IDX in inputs or bool(hoisting.row) or spec.return_lse or spec.dropout,
        mods_read_columns=_mentions("kv_idx", [*score_lines, *mask_lines], elements, near),
        mask_call=None if mask is None else mask.call(),
        score_call=None
        if scored is None or score is None
        else _as_tile(score, scored.call(score="score * score_scale")),
        score_scale=_gluon([scale])[0],
        blocks_from_map=spec.blocks is Blocks.MAP,
        bounds_lines=() if bounds is None else (*(f"# {c}" for c in bounds.comments), *bounds.lines),
        load_lines=() if bounds is None else needed((*_gluon(hoisting.head), *bounds.lines), _READ_BY_LOADS),
        order=_FIRST_ROWS_FIRST[0] if first_rows else _LAST_ROWS_FIRST[0],
        q_start=_FIRST_ROWS_FIRST[1] if first_rows else _LAST_ROWS_FIRST[1],
        has_keys=_HAS_KEYS[spec.blocks],
        masked=_masked(spec, bounds),
        sinks=spec.has_sinks,
        lse=spec.return_lse,
        dropout=spec.dropout,
        whole="survivors_weight" if spec.dropout else "1.0",
        rescue_nan=plan.rescue_nan,
        out_through_q=plan.out_through_q,
        tail="PADDED_DIM" if plan.tails[0] else "",
        tail_v="PADDED_DIM_V" if plan.tails[1] else "",
        buffers=_buffers(plan),
        consumers=tuple(range(plan.consumers)),
        worker_warps=(4,) * (plan.consumers - 1) + (1,),
        worker_registers=(plan.registers[0],) * (plan.consumers - 1) + (plan.registers[1],),
    )


def _buffers(plan: HopperPlan) -> str:
    """The names of those that loads fill."""
    tails = (["q_tail_smem", "k_tail_smem"] if plan.tails[0] else []) + (
        ["v_tail_smem"] if plan.tails[1] else []
    )
    return ", ".join(["q_smem", "k_smem", "v_smem", *tails])


def _near(score: Expr | None, mask: Expr | None) -> tuple[Expr | None, frozenset[Expr]]:
    """The score with its distances in parts, if the mask needs none of them."""
    found = None if score is None else near_form(score)
    if found is None or (mask is not None and found[1] & set(topological(mask))):
        return score, frozenset()
    return found


def _mentions(name: str, lines: Sequence[str], elements: Sequence[Element], near: frozenset[str]) -> bool:
    """Whether a step reads `name` besides in the parts of distances."""
    texts = [*_others(lines, near), *(a for e in elements for a in e.arguments)]
    return any(re.search(rf"\b{name}\b", text) for text in texts)


def _others(lines: Sequence[str], names: frozenset[str]) -> tuple[str, ...]:
    """The assignments to other than `names`."""
    return tuple(line for line in lines if line.partition(" = ")[0] not in names)


def _of(lines: Sequence[str], names: frozenset[str], index: str, near: str) -> tuple[str, ...]:
    """The assignments to `names`, an index replaced by a nearer one."""
    chosen = (line for line in lines if line.partition(" = ")[0] in names)
    return tuple(re.sub(rf"\b{index}\b", near, line) for line in chosen)


def _placement(view: _Forward) -> tuple[str, ...]:
    levels = {
        "head": view.head_lines,
        "row": (*view.row_lines, *view.near_row_lines),
        "column": (*view.near_column_lines, *view.score_column_lines, *view.mask_column_lines),
    }
    lines = [f"once a {level}: {line}" for level, lines in levels.items() for line in lines]
    return (*lines, *(f"per element: {f.name} = {f.doc}" for f in view.functions))


def _gluon(lines: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Statements that were emitted for Triton, in Gluon: the same words in another module.

    Gluon has no sigmoid: the file has one of its own.
    """
    return tuple(re.sub(r"\btl\.", "gl.", line.replace(_SIGMOID, "sigmoid(")) for line in lines)


def _function(function: Function) -> Function:
    return replace(function, statements=_gluon(function.statements), result=_gluon([function.result])[0])


def _bounds(bounds: Bounds) -> Bounds:
    return replace(bounds, lines=_gluon(bounds.lines))


def _masked(spec: AttentionSpec, bounds: Bounds | None) -> str | None:
    if bounds is not None:
        return bounds.masked
    return "(kv_start < full_first) | (kv_start >= full_end)" if spec.blocks is Blocks.MAP else None


def needed(lines: Sequence[str], users: Sequence[str]) -> tuple[str, ...]:
    """Those of `lines`, each an assignment, whose names `users` mention, or a later one that is needed."""
    kept: list[str] = []
    for line in reversed(lines):
        name = line.partition(" = ")[0]
        if any(re.search(rf"\b{re.escape(name)}\b", text) for text in (*kept, *users)):
            kept.append(line)
    return tuple(reversed(kept))


def _as_tile(score: Expr, call: str) -> str:
    """A score that does not read both row and column, or the score itself, is spread over the tile."""
    return call if place(score)[score] is Placement.ELEMENT else f"{call} + zero"


def _constants(spec: AttentionSpec, plan: HopperPlan) -> tuple[Constant, ...]:
    tiles = plan.tiles
    constants = [
        Constant("BLOCK_Q", tiles.block_q, "query rows of a tile"),
        Constant("CONSUMERS", plan.consumers, "warpgroups that share them"),
        Constant("ROWS", ROWS, "query rows of each"),
        Constant("BLOCK_KV", tiles.block_kv, "keys of a step"),
        Constant("STAGES", tiles.num_stages, "tiles of keys, and of values, that shared memory holds"),
        *_dims("DIM", "q and k", plan.padded_dim, plan.tails[0]),
        *_dims("DIM_V", "v", plan.padded_dim_v, plan.tails[1]),
        Constant("Q_BYTES", ROWS * plan.padded_dim * 2, "of one warpgroup's rows"),
        Constant("K_BYTES", tiles.block_kv * plan.padded_dim * 2, "of a tile of keys"),
        Constant("V_BYTES", tiles.block_kv * plan.padded_dim_v * 2, "of a tile of values"),
        Constant("L2_KEYS", plan.l2_keys, "keys with values that fit the L2 cache together"),
        Constant("OPERAND", _ELEMENT[spec.q_storage], "element type of q, k, v and out"),
        Constant("LOG2E", 1.4426950408889634, "1 / ln 2: the softmax is computed in base 2"),
    ]
    if plan.rescue_nan:
        constants += [
            Constant("HEAD_DIM", spec.head_dim, "of which these exist"),
            Constant("HEAD_DIM_V", spec.head_dim_v, "and these"),
            Constant("FEW_KEYS", 16, "keys of a step where values are left out"),
            Constant("FEW_DIMS", 64, "columns of its operands"),
        ]
    if spec.return_lse:
        constants.append(Constant("LN2", 0.6931471805599453, "back to the natural logarithm"))
    return tuple(constants)


def _dims(name: str, of: str, dim: int, tail: int) -> tuple[Constant, ...]:
    """The head dimension in its parts."""
    if not tail:
        return (Constant(f"PADDED_{name}", dim, f"head dimension of {of}, to a power of two"),)
    return (
        Constant(f"PADDED_{name}", dim - tail, f"first part of the head dimension of {of}"),
        Constant(f"TAIL_{name}", tail, "the other part, to a power of two"),
    )
