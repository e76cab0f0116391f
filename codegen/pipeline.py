"""From spec to source: every pass in the order that it runs."""

from __future__ import annotations

from collections.abc import Mapping

from flexc.codegen.module import GeneratedKernel, forward_module
from flexc.codegen.plan import NOTHING, make_plan
from flexc.codegen.target import Target
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
    plan = make_plan(spec, target, options, skip=skip)
    return forward_module(spec, plan, sources)
