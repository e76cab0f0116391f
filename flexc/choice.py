"""Which design of kernels serves a call on a GPU, and why not another."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flexc.call import AttentionCall
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.design import Design
from flexc.codegen.few_rows import (
    FEW,
    LONGEST_FEW,
    for_few_rows,
    for_few_rows_on_hopper,
    hopper_takes_few,
)
from flexc.errors import NoFeasiblePlan, UnknownOption, UnsupportedFeature
from flexc.ir.spec import AttentionSpec

Options = tuple[tuple[str, object], ...]
Rows = tuple[int, int, int]
"""Query rows of a head, query heads that share keys, and heads of the user's block map, 1 without one."""

_LONGEST_STRIDE = 2**40 - 1
"""Bytes; of a TMA descriptor."""


def design_for(
    call: AttentionCall, spec: AttentionSpec, target: str, backend: str
) -> tuple[Design, AttentionSpec]:
    """The design that serves a call, and its spec as that design takes it.

    Raises:
        UnsupportedFeature: `backend` names one that can't; the message says why.
    """
    why = None if backend == "triton" else why_not_hopper(call, spec, target)
    if backend == "hopper" and why is not None:
        raise UnsupportedFeature(
            f'backend="hopper" can\'t serve this call: {why}', hint='backend="auto" takes what can'
        )
    apart = call.k.shape[0] * call.k.shape[1]
    rows = _rows_of(call)
    design, suited = _suited(backend if why is None else "triton", spec, target, call.options, rows, apart)
    if design is Design.HOPPER and suited.mask is not None:
        from flexc.codegen.hopper_narrow import for_narrow_band

        lengths = call.q.shape[2], call.k.shape[2]
        suited = for_narrow_band(suited, call.values, lengths, dict(call.options))
    return design, suited


def usual_designs(call: AttentionCall, spec: AttentionSpec, target: str, backend: str) -> tuple[Design, ...]:
    """The designs whose kernels for any number of rows serve a call, the first choice first."""
    if backend == "triton" or why_not_hopper(call, spec, target) is not None:
        return (Design.PORTABLE,)
    return (Design.HOPPER,) if backend == "hopper" else (Design.HOPPER, Design.PORTABLE)


def for_rows_of(call: AttentionCall, spec: AttentionSpec) -> AttentionSpec:
    """The spec of a call with tiles of portable kernels for few rows, where it has few."""
    return for_few_rows(spec, *_rows_of(call), dict(call.options))


def _rows_of(call: AttentionCall) -> Rows:
    heads = 1 if call.block_map is None else call.block_map.heads
    return call.q.shape[2], call.q.shape[1] // max(call.k.shape[1], 1), heads


def design_named(
    backend: str, spec: AttentionSpec, target: str, options: Options, rows: Rows | None = None
) -> tuple[Design, AttentionSpec]:
    """The design that `flexc.compile` takes for a spec, and the spec as that design takes it.

    `rows` are those of the calls that the kernel is for; None for any.

    Raises:
        UnknownOption: there is no such backend of GPU kernels.
    """
    if backend not in ("auto", "triton", "hopper"):
        raise UnknownOption(
            f"no kernels belong to backend {backend!r}", hint='one of "auto", "triton", "hopper"'
        )
    if rows is not None:
        return _suited(backend, spec, target, options, rows)
    if backend == "triton":
        return Design.PORTABLE, spec
    return _design(backend, spec, target, options), spec


def _suited(
    backend: str, spec: AttentionSpec, target: str, options: Options, rows: Rows, apart: int | None = None
) -> tuple[Design, AttentionSpec]:
    """The design that serves so many rows, and the spec with its tiles for them.

    `apart` are the heads of keys of all batches; None for many.
    """
    if backend != "triton":
        packed = for_few_rows_on_hopper(spec, *rows, dict(options), apart)
        if backend == "hopper" or rows[0] >= FEW or hopper_takes_few(packed, rows[0]):
            design = _design(backend, packed, target, options)
            if design is not Design.PORTABLE:
                return design, packed
    return Design.PORTABLE, for_few_rows(spec, *rows, dict(options))


def few_lengths(
    backend: str, spec: AttentionSpec, target: str, options: Options, group: int
) -> tuple[int, ...]:
    """Query lengths of calls that have kernels for few rows, one a kernel.

    `group` query heads share keys and values.

    Raises:
        UnknownOption: as `design_named`.
    """
    found: dict[tuple[Design, AttentionSpec], int] = {}
    for q_len in range(1, LONGEST_FEW + 1):
        kernel = design_named(backend, spec, target, options, (q_len, group, 1))
        if kernel[1].few_rows:
            found.setdefault(kernel, q_len)
    return tuple(found.values())


def _design(backend: str, spec: AttentionSpec, target: str, options: Options) -> Design:
    if backend == "auto" and why_portable(spec, target, options) is not None:
        return Design.PORTABLE
    return Design.HOPPER


@lru_cache(maxsize=256)
def why_portable(spec: AttentionSpec, target: str, options: Options) -> str | None:
    """Why `backend="auto"` takes the portable kernel for a spec; None if it takes the Hopper kernel."""
    from flexc.codegen.hopper_plan import make_hopper_plan, unfit
    from flexc.codegen.target import target_named

    found = target_named(target)
    why = unfit(spec, found)
    if why is None:
        try:
            make_hopper_plan(spec, found, dict(options))
        except NoFeasiblePlan as error:
            why = error.message
    return why


def takes_hopper_backward(
    call: AttentionCall, backward: BackwardSpec, grad_out: torch.Tensor, target: str, backend: str
) -> bool:
    """Whether the Hopper kernels compute the backward of a call."""
    from flexc.distances import shares_distances

    if backend == "triton" or why_portable_backward(backward, target, call.options) is not None:
        return False
    if backward.slots and shares_distances(backward, call.values, (call.q.shape[2], call.k.shape[2])):
        return False
    tensors = (("q", call.q), ("k", call.k), ("v", call.v), ("grad_out", grad_out))
    return call.q.shape[2] >= FEW and why_no_tma(*tensors) is None


@lru_cache(maxsize=256)
def backward_parts(
    backward: BackwardSpec,
    target: str,
    options: Options,
    *,
    hopper: bool,
    wants_q: bool = True,
    wants_kv: bool = True,
) -> tuple[tuple[BackwardSpec, Entry], ...]:
    """The kernels of a backward in the order of their launch, each with its spec.

    On `hopper`, portable kernels repair what became NaN: what a mask hides may be NaN, and 0 * NaN is NaN.
    """
    from flexc.codegen.backward_form import has_places
    from flexc.codegen.backward_schedule import schedule
    from flexc.codegen.hopper_backward_dims import is_apart, is_of_pairs
    from flexc.codegen.hopper_backward_plan import suited
    from flexc.codegen.target import target_named

    if not hopper:
        found = schedule(backward, target_named(target), dict(options), wants_q=wants_q, wants_kv=wants_kv)
        portable = replace(backward, short=False)
        pairs = replace(portable, pairs=found.pairs)
        return tuple((portable if entry is Entry.ROWS else pairs, entry) for entry in found.entries)
    if is_apart(backward):
        return _apart(replace(backward, pairs=is_of_pairs(backward)), wants_q=wants_q)
    made = suited(backward)
    placed = ((replace(backward, short=False), Entry.CAPTURED),) if has_places(backward) else ()
    parts = (
        (replace(backward, clears_sums=True, short=False), Entry.ROWS),
        (made, Entry.HOPPER),
        (made, Entry.FINISH),
        *placed,
    )
    if backward.forward.mask is None:
        return parts
    repairs = replace(backward, repairs=True, short=False)
    order = (Entry.Q, Entry.KV) if backward.finds_delta else (Entry.KV, Entry.Q)
    return (*parts, *((repairs, entry) for entry in order), *placed)


def _apart(backward: BackwardSpec, *, wants_q: bool) -> tuple[tuple[BackwardSpec, Entry], ...]:
    """The kernels on Hopper where dQ has one of its own."""
    from flexc.codegen.hopper_backward_plan import suited
    from flexc.codegen.hopper_backward_queries import suited_queries

    whole = replace(backward, short=False)
    found = [(replace(whole, clears_sums=True, pairs=False), Entry.ROWS)]
    if backward.pairs:
        found.append((whole, Entry.PAIRS))
    found.append((suited(backward), Entry.HOPPER))
    if wants_q:
        found.append((suited_queries(whole), Entry.HOPPER_Q))
    if backward.forward.mask is not None:
        repairs = replace(whole, repairs=True)
        found.append((repairs, Entry.KV))
        found += [(repairs, Entry.Q)] if wants_q else []
    return tuple(found)


@lru_cache(maxsize=256)
def why_portable_backward(backward: BackwardSpec, target: str, options: Options) -> str | None:
    """Why portable kernels compute a backward; None if the Hopper kernels do."""
    from flexc.codegen.hopper_backward_plan import make_hopper_backward_plan, suited, unfit
    from flexc.codegen.target import target_named

    found = target_named(target)
    why = unfit(backward, found)
    if why is None:
        try:
            make_hopper_backward_plan(suited(backward), found, dict(options))
        except NoFeasiblePlan as error:
            why = error.message
    return why


def why_not_hopper(call: AttentionCall, spec: AttentionSpec, target: str) -> str | None:
    """Why the Hopper kernels can't serve a call; None if they can."""
    from flexc.codegen.hopper_plan import unfit
    from flexc.codegen.target import target_named

    why = unfit(spec, target_named(target))
    if why is not None:
        return why
    return why_no_tma(("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out))


def why_no_tma(*tensors: tuple[str, torch.Tensor | None]) -> str | None:
    """Why TMA can't copy blocks of these tensors; None if it can."""
    if any(x is not None and 0 in x.shape for _, x in tensors):
        return "TMA has no empty tensors"
    for name, x in tensors:
        if x is not None and any(s * x.element_size() > _LONGEST_STRIDE for s in x.stride()):
            return f"TMA takes strides below 2**40 bytes, and {name} has strides {x.stride()}"
    return None
