"""The `triton` backend: choose the kernel of a call, find its blocks, launch."""

from __future__ import annotations

import os
from dataclasses import replace

from flexc.block_lists import LEAST_BLOCK_SIZE
from flexc.call import AttentionCall, Result
from flexc.callspec import spec_of
from flexc.choice import design_for, for_rows_of, usual_designs
from flexc.codegen.design import Design
from flexc.errors import BackendUnavailable
from flexc.gpu_facts import target_of
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.launch import Launch
from flexc.prepared import Place, Prepared, Step, can_keep
from flexc.replay import keep


def run(call: AttentionCall, place: Place | None = None, backend: str = "triton") -> Result:
    """Compute a call on its GPU, or with the Triton interpreter when `TRITON_INTERPRET=1` is set.

    With a `place` the launch is kept for calls that repeat it. `backend`: "triton", "hopper", or "auto".
    """
    if not call.q.is_cuda:
        return _interpreted(call, backend)
    launch, is_aligned = _launch(call, backend)
    if place is not None and is_aligned and launch.programs and can_keep(call, place):
        keep(place, Prepared(call, launch, place.given, None))
    return launch.run()


def prepare(call: AttentionCall, place: Place, backend: str, step: Step) -> Prepared | None:
    """Keep the launch of a call whose results need gradients; None where it is of a kind that is not kept."""
    launch, is_aligned = _launch(call, backend)
    if not (is_aligned and launch.programs and can_keep(call, place)):
        return None
    prepared = Prepared(call, launch, place.given, step)
    keep(place, prepared)
    return prepared


def _launch(call: AttentionCall, backend: str) -> tuple[Launch, bool]:
    """The launch that computes a call, and whether it counts on rows that start at multiples of 16 bytes."""
    from flexc.build import kernel_for
    from flexc.device_map_cache import effective_device_map

    target = target_of(call.q.device.index).name
    design, spec = served_by(call, target, backend)
    kernel = kernel_for(spec, target, call.options, call.mods.sources, design)
    block_map = None
    if spec.blocks is Blocks.MAP:
        # A map has blocks of at least 16; tiles of few rows divide them.
        block_q = max(kernel.artifact.block_q, LEAST_BLOCK_SIZE)
        block_map = effective_device_map(call, block_q, kernel.artifact.block_kv)
    launch = Launch(
        kernel,
        call.q,
        call.k,
        call.v,
        values=call.values,
        block_map=block_map,
        scale=call.scale,
        sinks=call.sinks,
        out=call.out,
        dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed,
    )
    return launch, spec.aligned


def served_by(call: AttentionCall, target: str, backend: str) -> tuple[Design, AttentionSpec]:
    """The design and the spec of the kernel that serves a call.

    A kernel that was loaded serves any number of rows and keys: if there is such, none for few is compiled.
    """
    from flexc.build import is_loaded

    spec = spec_of(call)
    suited = design_for(call, spec, target, backend)
    if is_loaded(suited[1], target, call.options, suited[0]):
        return suited
    # What is compiled ahead serves any captured numbers: also caps that hold no score near zero.
    ahead = replace(spec, bounded=False)
    if ahead != spec:
        design, taken = design_for(call, ahead, target, backend)
        if is_loaded(taken, target, call.options, design):
            return design, taken
    if suited[1].few_rows or suited[1].narrow or suited[1].walk:
        for design in usual_designs(call, ahead, target, backend):
            if is_loaded(ahead, target, call.options, design):
                return design, ahead
    return suited


def _interpreted(call: AttentionCall, backend: str) -> Result:
    interprets = os.environ.get("TRITON_INTERPRET") == "1" and call.q.device.type == "cpu"
    if not interprets or backend == "hopper":
        raise BackendUnavailable(
            f'backend="{backend}" needs CUDA tensors; q is on {call.q.device}',
            hint='use backend="cpu", or set TRITON_INTERPRET=1 before Triton is imported',
        )
    from flexc.interpret import run

    return run(call, for_rows_of(call, spec_of(call)))
