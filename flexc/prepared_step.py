"""Prepared calls whose results need gradients: one node of autograd around a prepared launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flexc.call import AttentionCall
from flexc.differentiate import Numbers, gradients
from flexc.execute import statement_of
from flexc.prepared import Key, Prepared, Result
from flexc.statement import split_values


@dataclass(frozen=True, slots=True)
class Step:
    """What the node of a prepared call knows beside tensors."""

    numbers: Numbers
    returns_lse: bool

    def record(
        self,
        prepared: Prepared,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        captured: list[torch.Tensor],
    ) -> Result:
        """The result, which knows its backward."""
        tensors = (q, k, v, sinks, None, *captured)
        found: Any = _Prepared.apply(self, prepared, *tensors)  # type: ignore[no-untyped-call]
        return found if self.returns_lse else (found, None)


class _Prepared(torch.autograd.Function):
    """Its tensors are those of `Numbers.inputs`: q, k, v, sinks, no seed, captured tensors, no blocks."""

    @staticmethod
    def forward(ctx: Any, step: Step, prepared: Prepared, *tensors: Any) -> Any:
        out, lse = prepared.launch(*tensors[:4])
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        return (out, lse) if step.returns_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        results = (grad_out, grad_lse, out, lse)
        return None, None, *gradients(ctx.step.numbers, results, tensors, ctx.needs_input_grad[2:])


def prepare(call: AttentionCall, key: Key, backend: str) -> Result | None:
    """The result of a call that needs gradients, prepared for calls that repeat it.

    None where it is of a kind that is not kept.
    """
    from flexc import gpu

    tensors, integers, floats = split_values(call.captures, call.values)
    text = statement_of(call, backend, True)
    step = Step(Numbers(len(tensors), tuple(integers), tuple(floats), call.scale, text), call.return_lse)
    with torch.no_grad():
        prepared = gpu.prepare(replace(call, return_lse=True), key, backend, step)
    return None if prepared is None else prepared.run(call.q, call.k, call.v, call.sinks, call.values)
