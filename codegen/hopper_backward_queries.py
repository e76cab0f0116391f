"""Gathers what the file says of the Hopper kernel that computes dQ where it has one of its own."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace

from flexc._version import __version__
from flexc.codegen.arguments import (
    MAP_ARGUMENTS,
    SHAPE_ARGUMENTS,
    Argument,
    Source,
    capture_arguments,
    capture_names,
    descriptor_type,
    stride_arguments,
)
from flexc.codegen.backward_arguments import PAIRS_ARGUMENTS, mod_roots
from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_order import first_tiles
from flexc.codegen.backward_spec import ROWS_PADDED_TO, BackwardSpec, Entry
from flexc.codegen.bounds import BY_QUERIES, Bounds, range_roots, tile_bounds
from flexc.codegen.gluon_names import BARRIER, RENAMED
from flexc.codegen.hoisting import Hoisting, of_functions
from flexc.codegen.hopper_backward_arguments import pairs_descriptors, row_descriptor
from flexc.codegen.hopper_backward_constants import OPERANDS, WALK, existing_columns
from flexc.codegen.hopper_backward_mods import ModCalls, called_mods, helpers_of
from flexc.codegen.hopper_backward_names import NAMES_OF_BACKWARD
from flexc.codegen.hopper_backward_plan import HopperBackwardPlan, make_hopper_backward_plan
from flexc.codegen.hopper_distance import function_of
from flexc.codegen.hopper_words import gluon, needed
from flexc.codegen.module import GeneratedKernel, source_lines
from flexc.codegen.preamble import LOG2E, Constant
from flexc.codegen.refusals import off_the_map
from flexc.codegen.render import render
from flexc.codegen.target import Target
from flexc.codegen.tiles import Tiles
from flexc.errors import NoFeasiblePlan
from flexc.ir.graph import ModSource
from flexc.ir.spec import Blocks

ROWS = 64
"""Queries of one consumer warpgroup: what one wgmma takes."""
_WIDTH = 88
"""Of the lines that pass the arguments on; the deepest begin in column 20."""
_NAMES = NAMES_OF_BACKWARD | frozenset({
    "ROWS", "STAGES", "K_BYTES", "V_BYTES", "attention_backward_queries", "dq_desc", "q_mine", "dout_mine",
    "operand_layout", "rows", "row_at", "shift", "delta", "k_free", "v_free", "allowed",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Queries(ModCalls):
    """Everything that the template reads. Strings are pieces of Python."""

    renamed: tuple[str, ...]
    argument_lines: tuple[str, ...]
    head_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    moving_lines: tuple[str, ...]
    """What is computed once a column, in every step."""
    reads_rows: bool
    reads_columns: bool
    final_scale: str
    blocks_from_map: bool
    bounds_comments: tuple[str, ...]
    bounds_lines: tuple[str, ...]
    stretches: int
    stretch_lines: tuple[str, ...]
    masked: str | None
    """Where the mask applies to a tile, as a condition; None where there is no mask to look at."""
    first_start: str
    order: str
    operand: str
    rescue_nan: bool
    pairs: bool
    across_heads: bool
    """Whether tiles of all heads with as much to visit are neighbours. Else those of a head are."""


def suited_queries(backward: BackwardSpec) -> BackwardSpec:
    """`backward`, its tiles from a block map where the warp that loads can't compute them: it has no rows."""
    ranges = backward.ranges(Entry.HOPPER_Q)
    if ranges is None:
        return backward
    names = capture_names(backward.forward.captures, _NAMES)
    hoisting = Hoisting(backward.forward, names, [], set(_NAMES), range_roots(ranges))
    if not tile_bounds(ranges, hoisting, BY_QUERIES).reads_rows:
        return backward
    return replace(backward, forward=replace(backward.forward, blocks=Blocks.MAP))


def make_queries_plan(backward: BackwardSpec, target: Target) -> HopperBackwardPlan:
    """The plan of the kernel.

    Raises:
        NoFeasiblePlan: the Hopper kernels can't serve the spec, or its block map has other blocks.
    """
    plan = make_hopper_backward_plan(backward, target)
    tiles = Tiles(2 * ROWS, ROWS, 4, 2)
    blocks = backward.blocks(Entry.HOPPER_Q)
    cut = off_the_map(backward.forward, tiles.block_q, tiles.block_kv)
    if blocks is Blocks.MAP and cut:
        raise NoFeasiblePlan(
            f"no Hopper tiles fit the {backward.describe()}: {cut}", hint='pass backend="triton"'
        )
    width = plan.padded_dim * (4 if plan.pairs else 2)
    needed = (2 * tiles.block_q + 3 * tiles.block_kv) * width + 1024
    kept = [
        (name, why)
        for name, why in plan.reasons
        if name in ("design", "precision", "fast_tanh", "rescue_nan")
    ]
    reasons = (
        *kept,
        ("block_q", f"{ROWS} queries a warpgroup, whose dQ stays in registers"),
        ("num_stages", f"of keys; {needed} of {target.shared_memory} bytes of shared memory"),
    )
    return replace(plan, tiles=tiles, blocks=blocks.value, shared=needed, reasons=reasons)


def queries_module(
    backward: BackwardSpec, plan: HopperBackwardPlan, sources: tuple[ModSource, ...]
) -> GeneratedKernel:
    """The file of the kernel."""
    names = capture_names(backward.forward.captures, _NAMES)
    arguments = _arguments(backward, plan, names)
    view = _view(backward, plan, sources, names, arguments)
    levels = {"head": view.head_lines, "row": view.row_lines, "step": view.moving_lines}
    placement = tuple(f"once a {level}: {line}" for level, lines in levels.items() for line in lines)
    text = render(f"hopper_backward_{'pairs_' if plan.pairs else ''}queries.py.jinja", view)
    entry = Entry.HOPPER_Q.value
    return GeneratedKernel(text, entry, arguments, plan, (*placement, *of_functions(view.functions, ())))


def _arguments(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    if plan.pairs:
        return _arguments_of_pairs(backward, plan, names)
    spec, ranges = backward.forward, backward.ranges(Entry.HOPPER_Q)
    by_map = backward.blocks(Entry.HOPPER_Q) is Blocks.MAP
    roots = [root for root in (spec.score, spec.mask) if root is not None]
    roots += [] if ranges is None else range_roots(ranges)
    keys, dim = plan.tiles.block_kv, plan.padded_dim
    tensors = (
        ("q", Source.Q, Source.Q_DESCRIPTOR, ROWS, spec.head_dim),
        ("k", Source.K, Source.K_DESCRIPTOR, keys, spec.head_dim),
        ("v", Source.V, Source.V_DESCRIPTOR, keys, spec.head_dim_v),
        ("dout", Source.GRAD_OUT, Source.GRAD_OUT_DESCRIPTOR, ROWS, spec.head_dim_v),
        ("dq", Source.GRAD_Q, Source.GRAD_Q_DESCRIPTOR, ROWS, spec.head_dim),
    )
    element = spec.q_storage.value
    return (
        *(Argument(f"{name}_ptr", f"*{element}", source, divisible=True) for name, source, *_ in tensors),
        Argument("delta_ptr", "*fp32", Source.DELTA, divisible=True),
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
        *([Argument("lost_ptr", "*i32", Source.LOST)] if plan.rescue_nan else []),
        *capture_arguments(spec, names, roots),
        *(MAP_ARGUMENTS if by_map else ()),
        *stride_arguments(("q", "k", "v", "dout", "dq"), divisible=True),
        *SHAPE_ARGUMENTS,
        Argument("batch", "i32", Source.BATCH),
        Argument("never", "i32", Source.NEVER),
        *(
            Argument(f"{name}_desc", descriptor_type(element, (1, 1, n, dim)), descriptor, dimension=size)
            for name, _, descriptor, n, size in tensors
        ),
    )


def _arguments_of_pairs(
    backward: BackwardSpec, plan: HopperBackwardPlan, names: tuple[str, ...]
) -> tuple[Argument, ...]:
    spec, keys = backward.forward, plan.tiles.block_kv
    return (
        *PAIRS_ARGUMENTS,
        Argument("delta_ptr", "*fp32", Source.DELTA, divisible=True),
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
        Argument("dq_ptr", "*fp32", Source.GRAD_Q, divisible=spec.aligned),
        *([Argument("lost_ptr", "*i32", Source.LOST)] if plan.rescue_nan else []),
        *capture_arguments(spec, names, mod_roots(backward, Entry.HOPPER_Q)),
        *(MAP_ARGUMENTS if backward.blocks(Entry.HOPPER_Q) is Blocks.MAP else ()),
        *stride_arguments(("dq",), divisible=spec.aligned),
        *SHAPE_ARGUMENTS,
        Argument("batch", "i32", Source.BATCH),
        Argument("never", "i32", Source.NEVER),
        *pairs_descriptors(plan, (("q", ROWS), ("k", keys), ("v", keys), ("dout", ROWS))),
        row_descriptor("k_unit", Source.K_UNIT_DESCRIPTOR, keys),
        row_descriptor("v_unit", Source.V_UNIT_DESCRIPTOR, keys),
    )


def _view(
    backward: BackwardSpec,
    plan: HopperBackwardPlan,
    sources: tuple[ModSource, ...],
    names: tuple[str, ...],
    arguments: tuple[Argument, ...],
) -> _Queries:
    spec, entry = backward.forward, Entry.HOPPER_Q
    form = backward_form(backward, scatters=False)
    ranges = backward.ranges(entry)
    roots = [] if ranges is None else range_roots(ranges)
    hoisting = Hoisting(spec, names, form.roots, {a.name for a in arguments} | _NAMES, roots)
    bounds = None if ranges is None else tile_bounds(ranges, hoisting, BY_QUERIES)
    moving = tuple(line for root in form.roots for line in hoisting.column_lines(root))
    mods = called_mods(spec, form, hoisting)
    elements = mods.elements
    lines = (*hoisting.head, *hoisting.row, *moving)
    texts = [*lines, *(a for e in elements for a in e.arguments)]
    blocks = backward.blocks(entry)
    across = plan.pairs and blocks is not Blocks.ALL
    order = first_tiles(entry, bounds, across=across)
    masked = None if bounds is None else bounds.masked
    if blocks is Blocks.MAP:
        masked = "(kv_start < full_first) | (kv_start >= full_end)"
    return _Queries(
        header=_header(backward, sources),
        renamed=(*RENAMED, BARRIER),
        constants=_constants(backward, plan),
        helpers=helpers_of(elements, lines, hoisting),
        fast_tanh=plan.fast_tanh,
        functions=tuple(function_of(e.function) for e in elements),
        argument_lines=tuple(textwrap.wrap(", ".join(a.name for a in arguments) + ",", _WIDTH)),
        head_lines=gluon(hoisting.head),
        row_lines=gluon(hoisting.row),
        moving_lines=gluon(moving),
        reads_rows=any(re.search(r"\bq_idx\b", text) for text in texts),
        reads_columns=any(re.search(r"\bkv_idx\b", text) for text in texts),
        **mods.fields(),
        final_scale="scale" if form.factor is None else "score_scale",
        blocks_from_map=blocks is Blocks.MAP,
        bounds_comments=() if bounds is None else bounds.comments,
        bounds_lines=_bounds_lines(bounds, hoisting),
        stretches=1 if bounds is None else bounds.count,
        stretch_lines=() if bounds is None else gluon(bounds.stretch_lines),
        masked=masked,
        first_start=order["first_start"],
        order=order["order"],
        operand=OPERANDS[spec.q_storage],
        rescue_nan=plan.rescue_nan,
        pairs=plan.pairs,
        across_heads=across,
    )


def _bounds_lines(bounds: Bounds | None, hoisting: Hoisting) -> tuple[str, ...]:
    if bounds is None:
        return ()
    users = ("kv_first", "kv_end", "full_first", "full_end", *bounds.stretch_lines, bounds.masked)
    return gluon(needed((*hoisting.head, *bounds.lines), users))


def _constants(backward: BackwardSpec, plan: HopperBackwardPlan) -> tuple[Constant, ...]:
    tiles, dim, size = plan.tiles, plan.padded_dim, 4 if plan.pairs else 2
    return (
        Constant("BLOCK_Q", tiles.block_q, "queries of a program"),
        Constant("ROWS", ROWS, "queries of each of its two warpgroups"),
        Constant("BLOCK_KV", tiles.block_kv, "keys of a step"),
        Constant(
            "STAGES", tiles.num_stages, "tiles of keys that shared memory holds; of values it holds one"
        ),
        Constant("PADDED_DIM", dim, "head dimension, to a power of two"),
        *(existing_columns(backward)[:1] if plan.pairs else ()),
        Constant("Q_BYTES", 2 * tiles.block_q * dim * size, "of the queries and dO of a program"),
        Constant("K_BYTES", tiles.block_kv * dim * size, "of a tile of keys"),
        Constant("V_BYTES", tiles.block_kv * dim * size, "of a tile of values"),
        Constant("ROWS_PADDED_TO", ROWS_PADDED_TO, "rows of a head of delta and shift are padded to"),
        Constant("WALK", WALK, "steps whose keys shared memory tells"),
        Constant("OPERAND", OPERANDS[backward.forward.q_storage], "element type of all but the sums"),
        LOG2E,
    )


def _header(backward: BackwardSpec, sources: tuple[ModSource, ...]) -> str:
    lines = [
        f'"""Gradient of queries of attention for sm90: {backward.forward.describe()}.',
        "",
        f"Generated by flexc {__version__}. Launch cdiv(q_len, BLOCK_Q) * q_heads * batch programs with",
        "num_warps=4; the roles that are not the program's own have warps besides.",
        *source_lines(sources),
        '"""',
    ]
    return "\n".join(line.rstrip() for line in lines)
