"""From spec to source: every pass in the order that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexc.codegen.design import Design
from flexc.codegen.hopper import hopper_module
from flexc.codegen.hopper_plan import make_hopper_plan, unfit
from flexc.codegen.module import GeneratedKernel, forward_module
from flexc.codegen.plan import NOTHING, KernelPlan, make_plan
from flexc.codegen.target import MatrixUnit, Target
from flexc.codegen.tiles import Tiles
from flexc.ir.graph import ModSource
from flexc.ir.spec import AttentionSpec


def lower(
    spec: AttentionSpec,
    target: Target,
    *,
    options: Mapping[str, object] | None = None,
    sources: tuple[ModSource, ...] = (),
    skip: Mapping[Tiles, str] = NOTHING,
    design: Design = Design.PORTABLE,
) -> GeneratedKernel:
    """The generated kernel for `spec` on `target`.

    Before this, tracing gave graphs, which were verified, simplified and split into score and mask. Here:
    plan      every decision: tiles, warps, stages, precision
    form      index casts split, divisions to reciprocals, a constant factor of the score into the scale
    place     what is computed once a head, a row, a column
    emit      graphs to Triton statements
    render    the template filled, and checked to parse

    Raises:
        UnknownOption, NoFeasiblePlan: see `make_plan`.
    """
    if design is Design.HOPPER:
        return hopper_module(spec, make_hopper_plan(spec, target, options, skip=skip), sources)
    return forward_module(spec, _portable_plan(spec, target, options, skip), sources)


def _portable_plan(
    spec: AttentionSpec, target: Target, options: Mapping[str, object] | None, skip: Mapping[Tiles, str]
) -> KernelPlan:
    """A plan that also says why no kernel made for the target was taken, where there are such."""
    plan = make_plan(spec, target, options, skip=skip)
    if target.matrix_unit is not MatrixUnit.WGMMA:
        return plan
    why = (
        unfit(spec, target)
        or ("few rows: the tiles of the Hopper kernel would be mostly empty" if spec.few_rows else None)
        or "asked for, or what the call's lengths, strides or options say"
    )
    return replace(plan, reasons=(("design", why), *plan.reasons))


def plan_key(
    spec: AttentionSpec, target: Target, options: Mapping[str, object] | None, design: Design
) -> str:
    """A text that is equal for kernels of equal plans, before any was compiled.

    Raises:
        UnknownOption, NoFeasiblePlan: as `lower`.
    """
    if design is Design.HOPPER:
        return f"hopper {make_hopper_plan(spec, target, options).key()}"
    return make_plan(spec, target, options).key()
