"""Prepared calls whose results need gradients: one node of autograd around a prepared launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flexc.backends import choose
from flexc.backward_script import Recorded
from flexc.call import AttentionCall, Result
from flexc.differentiate import NAMED, Numbers, gradients
from flexc.execute import PLAIN, is_watched, statement_of
from flexc.gpu_backward import as_kernels_read, record
from flexc.map_tensors import tensors_of
from flexc.mapped import is_batched
from flexc.operators import call_of, name_of
from flexc.prepared import Place, Prepared, as_kernels_read_sinks
from flexc.refit import refitted
from flexc.statement import split_values


@dataclass(frozen=True, slots=True)
class Step:
    """What the node of a prepared call knows beside tensors."""

    numbers: Numbers
    returns_lse: bool
    blocks: tuple[torch.Tensor, ...]
    """Those of the user's block map."""
    backwards: dict[tuple[object, ...], Recorded] = field(default_factory=dict, compare=False)
    """By the layouts of what goes in, and what needs a gradient."""

    def record(
        self,
        prepared: Prepared,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
        captured: Sequence[torch.Tensor],
    ) -> Result:
        """The result, which knows its backward."""
        found: Any = _apply(self, prepared, q, k, v, sinks, seed, *captured, *self.blocks)
        return found if self.returns_lse else (found, None)


class _Prepared(torch.autograd.Function):
    """Its tensors are those of `Numbers.inputs`: q, k, v, sinks, seed, captured tensors, blocks."""

    @staticmethod
    def forward(ctx: Any, step: Step, prepared: Prepared, *tensors: Any) -> Any:
        q, k, v, sinks, seed, *others = tensors
        out, lse = prepared.launch(q, k, v, sinks, seed, others[: step.numbers.n_captures])
        ctx.step, ctx.prepared = step, prepared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        return (out, lse) if step.returns_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        found = _replay(ctx.step, ctx.prepared, grad_out, grad_lse, out, lse, tensors, needs)
        if found is None:
            found = gradients(ctx.step.numbers, (grad_out, grad_lse, out, lse), tensors, needs)
        return None, None, *found


# What `_Prepared.apply` comes to where no transform is at work.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Prepared).apply


def _replay(
    step: Step,
    prepared: Prepared,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    tensors: list[Any],
    needs: tuple[bool, ...],
) -> list[torch.Tensor | None] | None:
    """The gradients by a script that was recorded before, or is now; None where it can't be relied on.

    A hook on saved tensors may have put others in their place, and a graph has maps of its own.
    """
    if grad_out is None or is_watched() or torch.is_grad_enabled():
        return None
    q, k, v, sinks, seed = tensors[:NAMED]
    captures, n_captures = prepared.captures, step.numbers.n_captures
    captured = tensors[NAMED : NAMED + n_captures] if n_captures else ()
    if not _serves(prepared, q, k, v, out, grad_out) or is_batched(grad_out) or is_batched(grad_lse):
        return None
    if n_captures and not captures.hold(captured):
        return None
    if grad_out.dtype is not q.dtype or grad_out.data_ptr() & 15 or grad_lse is not None:
        grad_out, grad_lse = as_kernels_read(q, grad_out, grad_lse)
    layouts = (needs, q.stride(), k.stride(), v.stride(), out.stride(), grad_lse is None)
    if q.dtype is torch.float32:
        layouts = (*layouts, torch.backends.cuda.matmul.allow_tf32)  # type: ignore[assignment]  # one more
    recorded = step.backwards.get((*layouts, grad_out.stride()))
    if recorded is None and grad_lse is None:  # of strides that kernels can't read, none was ever recorded
        grad_out, _ = as_kernels_read(q, grad_out, None)
        recorded = step.backwards.get((*layouts, grad_out.stride()))
    if sinks is not None:
        sinks = as_kernels_read_sinks(sinks)
    given = (q, k, v, out, lse, grad_out, grad_lse, sinks, seed, *captures.there(captured))
    places = [place for place, need in enumerate(needs) if need]
    if recorded is None:
        found, recorded = _record(step, given, tensors, places)
        step.backwards[(*layouts, grad_out.stride())] = recorded
    else:
        found = recorded.run(given)
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    for place, grad in zip(places, found, strict=True):
        grads[place] = grad
    return grads


def _serves(
    prepared: Prepared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    grad_out: torch.Tensor,
) -> bool:
    """Whether these are tensors of the kind and place that the call was prepared with."""
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN and type(out) in PLAIN):
        return False
    if type(grad_out) not in PLAIN or torch.cuda.current_device() != q.get_device():
        return False
    if (prepared.reads_map or prepared.captures.needs_copies) and torch.cuda.is_current_stream_capturing():
        return False
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15


def _record(
    step: Step, given: tuple[Any, ...], tensors: list[Any], places: list[int]
) -> tuple[list[torch.Tensor], Recorded]:
    call, statement = call_of(*step.numbers.inputs(tensors))
    call = refitted(call)
    names = [name_of(call, place - (place > NAMED - 1)) for place in places]
    out, lse, grad_out, grad_lse = given[3:7]
    backend = choose(statement.backend, call.q.device)
    return record(call, out, lse, grad_out, grad_lse, names, backend)


def prepare(call: AttentionCall, place: Place, backend: str) -> Result | None:
    """The result of a call that needs gradients, prepared for calls that repeat it.

    None where it is of a kind that is not kept.
    """
    from flexc import gpu

    tensors, integers, floats = split_values(call.captures, call.values)
    text = statement_of(call, backend, True)
    step = Step(
        Numbers(len(tensors), tuple(integers), tuple(floats), call.scale, text),
        call.return_lse,
        () if call.block_map is None else tuple(tensors_of(call.block_map)),
    )
    with torch.no_grad():
        prepared = gpu.prepare(refitted(replace(call, return_lse=True)), place, backend, step)
    if prepared is None:
        return None
    seed = call.dropout_seed if isinstance(call.dropout_seed, torch.Tensor) else None
    captured = prepared.captures.of(call.values, grad=True)
    if captured is None:
        return None
    drops = call.dropout_p > 0
    return prepared.run(call.q, call.k, call.v, call.sinks, captured, place.given, seed, drops=drops)
