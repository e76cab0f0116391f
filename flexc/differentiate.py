"""Attention on the CPU as a function of PyTorch's autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexc import cpu, cpu_backward
from flexc.call import AttentionCall
from flexc.errors import NotDifferentiable


def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of a call, recorded for autograd where an input requires a gradient.

    Returns out (B, Hq, L, Dv), and lse (B, Hq, L) where the call asks for it.

    Raises:
        NotDifferentiable: the result would be written to the user's own tensor.
    """
    inputs = (call.q, call.k, call.v, call.sinks, *call.values)
    needed = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
    if not torch.is_grad_enabled() or not any(needed):
        return cpu.run(call)
    if call.out is not None:
        raise NotDifferentiable(
            "an input requires a gradient, and the result is written to out=",
            hint="leave out= away, or call it under torch.no_grad()",
        )
    out, lse = _Attend.apply(call, *inputs)  # type: ignore[no-untyped-call]
    return out, lse if call.return_lse else None


class _Attend(torch.autograd.Function):
    """Saves the tensors of a call, its output and its lse; the backward computes the rest again."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = cpu.run(replace(call, return_lse=True))
        assert lse is not None
        tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
        ctx.save_for_backward(out, lse, *tensors)
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        nothing = out.new_empty(0)  # the call itself must not hold what is saved
        ctx.call = replace(call, q=nothing, k=nothing, v=nothing, sinks=None, values=(), out=None)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        inputs = [n if x is None else x for x, n in zip(tensors, ctx.numbers, strict=True)]
        q, k, v, sinks, *values = inputs
        call = replace(ctx.call, q=q, k=k, v=v, sinks=sinks, values=tuple(values))
        names = ["q", "k", "v", "sinks", *range(len(values))]
        wanted = frozenset(n for n, need in zip(names, ctx.needs_input_grad[1:], strict=True) if need)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        found = cpu_backward.backward(call, out, lse, grad_out, grad_lse, wanted)
        return None, found.q, found.k, found.v, found.sinks, *found.values
