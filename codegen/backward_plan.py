"""The plan of each kernel of a backward."""

from __future__ import annotations

from collections.abc import Mapping

from flexc.codegen.arguments import capture_names
from flexc.codegen.backward_module import backward_module
from flexc.codegen.backward_spec import SLICE, BackwardSpec, Entry
from flexc.codegen.backward_tiles import PLACES, backward_tiles, row_tiles
from flexc.codegen.blocks import why_blocks
from flexc.codegen.hopper_backward import hopper_backward_module
from flexc.codegen.hopper_backward_plan import HopperBackwardPlan, make_hopper_backward_plan, unfit
from flexc.codegen.hopper_backward_queries import make_queries_plan, queries_module
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.plan import (
    BACKWARD_OPTIONS,
    NOTHING,
    WHY_PAIRS,
    KernelPlan,
    check_options,
    choose_precision,
    choose_tanh,
    tile_option,
)
from flexc.codegen.target import MatrixUnit, Target
from flexc.codegen.tiles import PAIRS, Tiles, power_of_two_at_least
from flexc.ir.graph import ModSource

_SMALL = (Entry.ROWS, Entry.PAIRS, Entry.Q_SUMS, Entry.CAPTURED)


def make_backward_plan(
    backward: BackwardSpec,
    entry: Entry,
    target: Target,
    options: Mapping[str, object] | None = None,
    *,
    skip: Mapping[Tiles, str] = NOTHING,
) -> KernelPlan:
    """The plan of one kernel of a backward. `options` override; `skip` are tiles that proved bad, and how.

    Raises:
        UnknownOption: an option that no plan has, or a value that it can't take.
        NoFeasiblePlan: the tiles that `options` ask for do not fit the target.
    """
    if entry in (Entry.HOPPER, Entry.FINISH):
        return make_hopper_backward_plan(backward, target, options, skip=skip)
    if entry is Entry.HOPPER_Q:
        return make_queries_plan(backward, target)
    options = options or {}
    check_options(options)
    spec = backward.forward
    wanted = {
        name.removeprefix("backward_"): tile_option(name, options[name])
        for name in BACKWARD_OPTIONS
        if name in options
    }
    precision, why_precision = choose_precision(spec, target, options.get("precision"))
    if backward.pairs:
        precision, why_precision = PAIRS, WHY_PAIRS
    is_small = entry in _SMALL
    is_sliced = backward.slices > 1 and not is_small
    fast_tanh, why_tanh = choose_tanh(spec, options.get("fast_tanh"))
    rescue = False
    if entry is Entry.CAPTURED:
        tiles = Tiles(PLACES, 16, 4, 1)
        reasons = [("block_q", "rows or distances of a program")]
    elif is_small:
        tiles = row_tiles(backward)  # they read rows, and walk nothing
        elements = 4096 if backward.clears_sums else 8192
        reasons = [("block_q", f"about {elements} elements a program")]
    else:
        tiles, why_tiles = backward_tiles(backward, entry, target, wanted, skip)
        rescue = spec.mask is not None
        why_rescue = "what no row sees may be NaN, and 0 * NaN is NaN" if rescue else "no mask"
        reasons = [
            *_why_portable(backward, target),
            *why_tiles,
            ("precision", why_precision),
            ("fast_tanh", why_tanh),
            ("blocks", _why_blocks(backward, entry, options.get("blocks"))),
            ("rescue_nan", why_rescue),
        ]
    return KernelPlan(
        packed_heads=1,
        target=target,
        tiles=tiles,
        blocks=backward.blocks(entry).value,
        padded_dim=SLICE if is_sliced else power_of_two_at_least(spec.head_dim),
        padded_dim_v=SLICE if is_sliced else power_of_two_at_least(spec.head_dim_v),
        precision=precision,
        fast_tanh=fast_tanh,
        rescue_nan=rescue,
        reasons=tuple(reasons),
    )


def _why_blocks(backward: BackwardSpec, entry: Entry, wanted: object) -> str:
    spec = backward.forward
    names = capture_names(spec.captures)
    return why_blocks(spec, names, wanted, blocks=backward.blocks(entry), axes=entry.axes)


def _why_portable(backward: BackwardSpec, target: Target) -> list[tuple[str, str]]:
    """Why no kernel made for the target was taken, where there are such."""
    if target.matrix_unit is not MatrixUnit.WGMMA:
        return []
    if backward.repairs:
        return [("design", "computes again what became NaN in the kernels made for this target")]
    why = unfit(backward, target)
    return [("design", why or "asked for, or what the call's lengths, strides, options or tables say")]


def lower_backward(
    backward: BackwardSpec,
    entry: Entry,
    target: Target,
    *,
    options: Mapping[str, object] | None = None,
    sources: tuple[ModSource, ...] = (),
    skip: Mapping[Tiles, str] = NOTHING,
) -> GeneratedKernel:
    """The generated file of one kernel of a backward, made as `lower` makes a forward.

    Raises:
        UnknownOption, NoFeasiblePlan: see `make_backward_plan`.
    """
    plan = make_backward_plan(backward, entry, target, options, skip=skip)
    if entry is Entry.HOPPER_Q and isinstance(plan, HopperBackwardPlan):
        return queries_module(backward, plan, sources)
    if isinstance(plan, HopperBackwardPlan):
        return hopper_backward_module(backward, entry, plan, sources)
    return backward_module(backward, entry, plan, sources)
