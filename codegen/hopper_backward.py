"""Gathers what the generated file of a Hopper backward says."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexc.codegen.arguments import capture_names
from flexc.codegen.backward_form import Form, backward_form
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.bounds import BY_KEYS, Bounds, range_roots, tile_bounds
from flexc.codegen.distance import reads_by_distance
from flexc.codegen.gluon_names import ADDING, RENAMED
from flexc.codegen.hoisting import Element, Hoisting, of_functions
from flexc.codegen.hopper_backward_arguments import main_arguments
from flexc.codegen.hopper_backward_constants import OPERANDS, constants_of
from flexc.codegen.hopper_backward_dims import APART, IN_PARTS
from flexc.codegen.hopper_backward_finish import finish_module, header, is_global
from flexc.codegen.hopper_backward_mods import ModCalls, called_mods, helpers_of
from flexc.codegen.hopper_backward_names import NAMES_OF_BACKWARD
from flexc.codegen.hopper_backward_plan import HopperBackwardPlan
from flexc.codegen.hopper_distance import ByDistance, by_distance, function_of
from flexc.codegen.hopper_gradients import HopperScatter, hopper_scatters
from flexc.codegen.hopper_masks import Side, by_ends, mask_near, told_sides
from flexc.codegen.hopper_staged import StagedRows, stage_rows
from flexc.codegen.hopper_words import depending, gluon, needed, target_of
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.render import render
from flexc.codegen.scatter import Sum
from flexc.codegen.scatter_code import scatter_code
from flexc.ir.build import const
from flexc.ir.graph import ModSource
from flexc.ir.ops import Input
from flexc.ir.simplify import simplify
from flexc.ir.spec import Blocks
from flexc.ir.substitute import substitute
from flexc.ir.types import Storage

_WIDTH = 88
"""Of the lines that pass the arguments on; the deepest begin in column 20."""
_OF_DIM = {IN_PARTS: "_in_parts", APART: "_apart"}
"""Templates of wide heads."""
_PAIR = {Storage.BF16: "bf16x2", Storage.FP16: "f16x2"}
# Two 16-bit numbers of register $1 as fp32.
_UNPACK = {
    Storage.BF16: ("shl.b32 s0, $1, 16;", "and.b32 s1, $1, 0xffff0000;"),
    Storage.FP16: (
        ".reg .b16 h0, h1;",
        "mov.b32 {h0, h1}, $1;",
        "cvt.f32.f16 s0, h0;",
        "cvt.f32.f16 s1, h1;",
    ),
}
_HEADS_APART = "Heads come one after another."
_HEADS_TOGETHER = (
    "A few heads, whose queries the L2 cache holds, take turns: so that programs of different length run\n"
    "    beside each other. The first keys of a head come first: under a causal mask most queries see them."
)
_LAST_KEYS_FIRST = (
    "A few heads, whose queries the L2 cache holds, take turns. The last keys of a head come first, and\n"
    "    their dQ is added first: under a causal mask a program is two tiles ahead of who waits for it."
)
_HEADS_SIDE_BY_SIDE = (
    "As many heads as run at a time take turns: programs of one head, which wait for each other, then begin\n"
    "    one after another. The last keys of a head come first, and their dQ is added first."
)


@dataclass(frozen=True, slots=True)
class _Main(ModCalls):
    """Everything that the template of the large kernel reads. Strings are pieces of Python."""

    renamed: tuple[str, ...]
    argument_lines: tuple[str, ...]
    head_lines: tuple[str, ...]
    column_lines: tuple[str, ...]
    column_lines_of_head: tuple[str, ...]
    """What is computed once a column, and what of that depends on the head."""
    reads_rows: bool
    """The mods, gradients of captured tensors or dropout need to know which rows a tile has."""
    mods_read_head: bool
    staged: StagedRows
    """What the loading warp finds out once a row."""
    staged_smems: str
    score_row_lines: tuple[str, ...]
    """What a step computes once a row for scores and their gradients, and for the mask."""
    mask_row_lines: tuple[str, ...]
    score_reads_rows: bool
    mask_reads_rows: bool
    mask_near: str | None
    """The mask's call with its comparisons counted from a thread's first row, where that may be."""
    mask_sides: tuple[Side, ...]
    """The mask as comparisons with the ends of a key's rows: which one decides, the loading warp tells."""
    mods_read_columns: bool
    scale_per_head: bool
    scale_of_head: bool
    final_scale: str | None
    blocks_from_map: bool
    tells_masked: bool
    """The loading warp says whether the mask applies to a tile of queries."""
    bounds_comments: tuple[str, ...]
    bounds_lines: tuple[str, ...]
    """What finds the stretches of queries that see the keys of a program, from its coordinates."""
    walk: str
    """What the loading warp remembers from tile to tile; and what of that starts at 0."""
    walk_from_zero: tuple[str, ...]
    stretches: int
    stretch_lines: tuple[str, ...]
    masked_tile: str
    order: str
    together: str
    groups: int
    warps_besides: str
    """Warps of each role but the program's own, and the registers of their threads."""
    registers_besides: str
    in_turns: bool
    late: bool
    delta_first: bool
    """dP is added to -delta; or else delta is taken off it last."""
    delta_last: bool
    gives_early: bool
    """The turn for S and dK passes on before S is complete: random words or a wait come in between."""
    in_parts: bool
    apart: bool
    pairs: bool
    halves_are_columns: bool
    register_bases: str
    unpack: tuple[str, ...]
    by_distance: ByDistance
    scatters: tuple[HopperScatter, ...]
    scatters_read_rows: bool
    adds_diagonals: bool
    adds_heads: bool
    adds_exactly: bool
    exact_weights: bool
    operand: str
    operand_pair: str
    rescue_nan: bool
    ordered: bool
    shares_tiles: bool
    """Programs take tiles of keys until there are none."""
    visit_lines: tuple[str, ...]
    """Of one stretch: what finds the rows that visit keys, `q_first` and `q_end`."""
    dropout: bool
    weighs_first: bool
    """The weights of a step have to be complete when the turn for its products is taken."""
    half_bases: str
    """Registers of the pairs whose words one counter has."""


def hopper_backward_module(
    backward: BackwardSpec, entry: Entry, plan: HopperBackwardPlan, sources: tuple[ModSource, ...]
) -> GeneratedKernel:
    """The file of the large kernel of a Hopper backward, or of the one that finishes dQ."""
    form = _linear(backward_form(backward, scatters=bool(backward.slots) and entry is Entry.HOPPER))
    if entry is Entry.FINISH:
        return finish_module(backward, plan, form)
    if form.mask is not None:
        form = replace(form, mask=by_ends(form.mask, backward.ranges(entry), BY_KEYS))
    names = capture_names(backward.forward.captures, NAMES_OF_BACKWARD)
    arguments = main_arguments(backward, plan, names)
    view = _view(backward, plan, form, sources, names, tuple(a.name for a in arguments))
    template = "hopper_backward" + _form_of(plan)
    text = render(f"{template}.py.jinja", view)
    return GeneratedKernel(text, entry.value, arguments, plan, _placement(view))


def _linear(form: Form) -> Form:
    """`grad` as the factor that the gradient is multiplied by: it is linear in the one that comes in."""
    if form.grad is None:
        return form
    return replace(form, grad=simplify(substitute(form.grad, {Input.GRAD: const(1.0)})))


def _view(
    backward: BackwardSpec,
    plan: HopperBackwardPlan,
    form: Form,
    sources: tuple[ModSource, ...],
    names: tuple[str, ...],
    arguments: tuple[str, ...],
) -> _Main:
    spec = backward.forward
    blocks, ranges = backward.blocks(Entry.HOPPER), backward.ranges(Entry.HOPPER)
    bound_roots = [] if ranges is None else range_roots(ranges, BY_KEYS)
    hoisting = Hoisting(
        spec,
        names,
        form.roots,
        set(arguments) | NAMES_OF_BACKWARD,
        bound_roots,
        columns_stay=True,
        by_distance=reads_by_distance(*form.of_scores),
    )
    bounds = None if ranges is None else tile_bounds(ranges, hoisting, BY_KEYS)
    score_rows = (*hoisting.row_lines(form.score), *hoisting.row_lines(form.grad))
    score_rows += tuple(line for scatter in form.scatters for line in hoisting.row_lines(scatter.value))
    mask_rows = hoisting.row_lines(form.mask)
    mods = called_mods(spec, form, hoisting)
    scale = mods.scale
    codes = tuple(scatter_code(hoisting, scatter) for scatter in form.scatters)
    scatters = hopper_scatters(
        backward, form, codes, names, [hoisting.fresh(f"{names[c.form.slot]}_sum") for c in codes]
    )
    readers = [*mods.elements, *(x for c in codes for x in (c.value, c.at) if x is not None)]
    staged = stage_rows(
        backward, hoisting, score_rows, mask_rows, [a for reader in readers for a in reader.arguments]
    )
    emitted = [*hoisting.head, *hoisting.column, *score_rows, *mask_rows]
    score_rows, mask_rows = staged.score_lines, staged.mask_lines
    values = [code.value for code, scatter in zip(codes, scatters, strict=True) if not scatter.is_own]
    elements = [*mods.elements, *(value for value in values if value is not None)]
    per_head = not is_global(form)
    scored = [e for e in (mods.score, mods.grad) if e is not None]
    columns = plan.dq_columns
    bases = [[1], [2], *([512 << i] for i in range((columns // 8).bit_length() - 1))]
    reads_rows_score = _reads("q_idx", scored, score_rows)
    distances = by_distance(hoisting.vectors, plan.tiles.block_q, is_by_keys=True)
    has_distances = bool(distances.vectors)
    near = None
    if mods.mask is not None and form.mask is not None:
        near = mask_near(form.mask, mods.mask, hoisting, BY_KEYS)
    compared = [] if mods.mask is None or near is not None else [mods.mask]
    reads_rows_mask = _reads("q_idx", compared, mask_rows)
    scale_of_head = mods.needs_scale and per_head
    head_lines = list(hoisting.head)
    if scale_of_head:
        head_lines.append(f"score_scale = {scale}")
    of_head = depending(("h", *map(target_of, hoisting.head)), hoisting.column)
    uneven = blocks is not Blocks.ALL
    # With a factor on the gradient of the score registers are few already when dP is issued.
    delta_first = plan.in_turns and not scatters and not spec.dropout and mods.grad is None
    delta_first = delta_first and not plan.in_parts and not plan.apart
    return _Main(
        header=header(backward, Entry.HOPPER, sources),
        renamed=(*RENAMED, *ADDING),
        starts_early=True,
        constants=constants_of(backward, plan),
        helpers=helpers_of(elements, emitted, hoisting),
        fast_tanh=plan.fast_tanh,
        functions=(
            *(v.function for v in distances.vectors),
            *(
                function_of(e.function)
                for e in (*elements, *(code.at for code in codes if code.at is not None))
            ),
        ),
        argument_lines=tuple(textwrap.wrap(", ".join(arguments) + ",", _WIDTH)),
        head_lines=gluon(head_lines),
        column_lines=gluon([line for line in hoisting.column if line not in of_head]),
        column_lines_of_head=gluon([line for line in hoisting.column if line in of_head]),
        reads_rows=reads_rows_score or reads_rows_mask or has_distances or bool(scatters) or spec.dropout,
        mods_read_head=has_distances
        or bool(scatters)
        or bool(head_lines or of_head)
        or _reads("h", elements, (*score_rows, *mask_rows)),
        staged=staged,
        staged_smems="".join(f" {value.smem}," for value in staged.values),
        score_row_lines=score_rows,
        mask_row_lines=tuple(re.sub(r"\bq_idx\b", "q_here", line) for line in mask_rows),
        score_reads_rows=reads_rows_score,
        mask_reads_rows=reads_rows_mask,
        mask_near=near,
        mask_sides=()
        if form.mask is None or bounds is None
        else told_sides(form.mask, bounds.masked, hoisting),
        mods_read_columns=bool(scatters)
        or _reads("kv_idx", elements, (*score_rows, *mask_rows, *hoisting.column)),
        **mods.fields(q_idx="q_here"),
        scale_of_head=scale_of_head,
        scale_per_head=per_head,
        final_scale=None if per_head else gluon([scale or "scale"])[0],
        blocks_from_map=blocks is Blocks.MAP,
        tells_masked=blocks is not Blocks.ALL,
        **_walk(blocks, bounds, hoisting),
        **_places(uneven=uneven, ordered=plan.ordered),
        groups=plan.groups,
        **_roles(plan),
        in_turns=plan.in_turns,
        late=plan.late,
        delta_first=delta_first,
        delta_last=not spec.dropout and not delta_first,
        gives_early=(plan.ordered and plan.late) or spec.dropout,
        in_parts=plan.in_parts,
        apart=plan.apart,
        pairs=plan.pairs,
        halves_are_columns=plan.halves_are_columns,
        register_bases=str(bases),
        unpack=_UNPACK.get(spec.q_storage, ()),
        by_distance=distances,
        scatters=scatters,
        scatters_read_rows=_reads("q_idx", values, ()),
        adds_diagonals=any(s.sum == Sum.DIAGONAL.value for s in scatters),
        exact_weights=any(s.sum != Sum.HEAD.value for s in scatters),
        adds_heads=any(s.sum == Sum.HEAD.value for s in scatters),
        adds_exactly=any(s.exactly for s in scatters),
        operand=OPERANDS[spec.q_storage],
        operand_pair=_PAIR.get(spec.q_storage, ""),
        rescue_nan=plan.rescue_nan,
        ordered=plan.ordered,
        shares_tiles=plan.in_rounds,
        dropout=spec.dropout,
        # With wide heads the registers are so few that they are complete in any case.
        weighs_first=spec.dropout and plan.in_turns and plan.padded_dim == 64,
        half_bases=str([[0, 1], *([0, 8 << i] for i in range((plan.tiles.block_q // 16).bit_length() - 1))]),
    )


def _roles(plan: HopperBackwardPlan) -> dict[str, Any]:
    """Besides the program's own warpgroup: another, one warp that loads, and two that add dQ up in order."""
    groups, single = plan.groups - 1, 3 if plan.ordered else 1
    return {
        "warps_besides": str([4] * groups + [1] * single),
        "registers_besides": str([240] * groups + [24] * single),
    }


def _places(*, uneven: bool, ordered: bool) -> dict[str, Any]:
    """In which order programs take the tiles of keys."""
    if uneven:
        together, order = "gl.minimum(gl.maximum(L2_ROWS // q_len, 2), 4)", _HEADS_TOGETHER
        return {"together": together, "order": _LAST_KEYS_FIRST if ordered else order}
    together = "gl.maximum(RESIDENT // kv_tiles, 1)" if ordered else "1"
    return {"together": together, "order": _HEADS_SIDE_BY_SIDE if ordered else _HEADS_APART}


def _walk(blocks: Blocks, bounds: Bounds | None, hoisting: Hoisting) -> dict[str, Any]:
    """What the loading warp remembers from tile to tile, and computes for a stretch of them."""
    lines: tuple[str, ...] = ()
    visits: tuple[str, ...] = ()
    stretch_lines: tuple[str, ...] = ()
    if bounds is None:
        names = ["stretch", "end_stretch", "q_end", "full_first", "full_end"] if blocks is Blocks.MAP else []
        masked = "False"
    else:
        stretch_lines, masked = gluon(bounds.stretch_lines), bounds.masked
        names = [n for n in ("q_end", "full_first", "full_end") if n == "q_end" or n in masked]
        names = ["stretch", *names] if bounds.count > 1 else names
        computed = (*hoisting.head, *bounds.lines)
        lines = gluon(needed(computed, ("q_first", *names, *bounds.stretch_lines)))
        visits = gluon(needed(computed, ("q_first", "q_end")))
    return {
        "walk": ", ".join(["h", *names, "q_start"]),
        "walk_from_zero": tuple(names),
        "bounds_comments": () if bounds is None else bounds.comments,
        "bounds_lines": lines,
        "stretches": 1 if bounds is None else bounds.count,
        "stretch_lines": stretch_lines,
        "masked_tile": f"({masked})",
        "visit_lines": visits,
    }


def _reads(name: str, elements: Sequence[Element], lines: Sequence[str]) -> bool:
    """Whether what a step computes reads `name`."""
    texts = [*lines, *(argument for e in elements for argument in e.arguments)]
    return any(re.search(rf"\b{name}\b", text) for text in texts)


def _form_of(plan: HopperBackwardPlan) -> str:
    """What the name of a plan's template ends with."""
    if plan.pairs:
        return "_pairs"
    return "_in_rounds" if plan.in_rounds else _OF_DIM.get(plan.padded_dim, "")


def _placement(view: _Main) -> tuple[str, ...]:
    levels = {"head": view.head_lines, "column": view.column_lines}
    lines = [f"once a {level}: {line}" for level, lines in levels.items() for line in lines]
    lines += [f"once a step: {line}" for line in (*view.score_row_lines, *view.mask_row_lines)]
    return (*lines, *of_functions(view.functions, view.by_distance.vectors))
