"""Which design of kernels serves a call on a GPU, and why not another."""

from __future__ import annotations

from flexc.call import AttentionCall
from flexc.codegen.design import Design
from flexc.errors import UnknownOption, UnsupportedFeature
from flexc.ir.spec import AttentionSpec

PREFER_HOPPER = False
"""Whether `backend="auto"` takes the Hopper kernels where they fit."""
_FEW_ROWS = 64
"""With fewer, a Hopper tile is mostly empty: the portable kernels have smaller ones."""


def design_for(
    call: AttentionCall, spec: AttentionSpec, target: str, backend: str
) -> tuple[Design, AttentionSpec]:
    """The design that serves a call, and its spec as that design takes it.

    Raises:
        UnsupportedFeature: `backend` names one that can't; the message says why.
    """
    few_rows = call.q.shape[2] < _FEW_ROWS
    if backend == "triton" or (backend == "auto" and (few_rows or not PREFER_HOPPER)):
        return Design.PORTABLE, spec
    why = why_not_hopper(call, spec, target)
    if why is None:
        from flexc.codegen.hopper_plan import suited

        return Design.HOPPER, suited(spec)
    if backend == "hopper":
        raise UnsupportedFeature(
            f'backend="hopper" can\'t serve this call: {why}', hint='backend="auto" takes what can'
        )
    return Design.PORTABLE, spec


def design_named(backend: str, spec: AttentionSpec, target: str) -> tuple[Design, AttentionSpec]:
    """The design that `flexc.compile` takes for a spec, and the spec as that design takes it.

    Raises:
        UnknownOption: there is no such backend of GPU kernels.
    """
    from flexc.codegen.hopper_plan import suited, unfit
    from flexc.codegen.target import target_named

    if backend not in ("auto", "triton", "hopper"):
        raise UnknownOption(
            f"no kernels belong to backend {backend!r}", hint='one of "auto", "triton", "hopper"'
        )
    fits = PREFER_HOPPER and unfit(spec, target_named(target)) is None
    if backend == "hopper" or (backend == "auto" and fits):
        return Design.HOPPER, suited(spec)
    return Design.PORTABLE, spec


def why_not_hopper(call: AttentionCall, spec: AttentionSpec, target: str) -> str | None:
    """Why the Hopper kernels can't serve a call; None if they can."""
    from flexc.codegen.hopper_plan import unfit
    from flexc.codegen.target import target_named

    why = unfit(spec, target_named(target))
    if why is not None:
        return why
    if 0 in call.q.shape or 0 in call.k.shape:
        return "TMA has no empty tensors"
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)):
        if x is not None and any(s <= 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
            return f"TMA reads no expanded dimension, and {name} has strides {x.stride()}"
    return None
