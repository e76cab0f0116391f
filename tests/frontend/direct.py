"""What a mod computes when PyTorch runs it on every element: the reference of traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from flexc.frontend.trace import Trace
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.ops import Input


def grid(batch: int, heads: int, q_len: int, kv_len: int) -> tuple[torch.Tensor, ...]:
    """The four indices as int32 tensors that broadcast to (batch, heads, q_len, kv_len)."""
    return tuple(
        torch.arange(n, dtype=torch.int32).reshape([-1 if i == d else 1 for i in range(4)])
        for d, n in enumerate((batch, heads, q_len, kv_len))
    )


def run_directly(
    function: Callable[..., Any], shape: tuple[int, int, int, int], score: torch.Tensor | None = None
) -> torch.Tensor:
    """The function on every element by torch.vmap, as PyTorch's flex_attention runs it."""
    for dimension in (3, 2, 1, 0):
        indices = tuple(0 if i == dimension else None for i in range(4))
        function = torch.vmap(function, in_dims=indices if score is None else (0, *indices))
    arguments = [torch.arange(n, dtype=torch.int32) for n in shape]
    with TransformGetItemToIndex():
        result = function(*arguments) if score is None else function(score, *arguments)
    assert isinstance(result, torch.Tensor)
    return result


def run_graph(
    trace: Trace, shape: tuple[int, int, int, int], score: torch.Tensor | None = None
) -> torch.Tensor:
    """The traced graph on every element."""
    b, h, q_idx, kv_idx = grid(*shape)
    inputs: dict[Input, Any] = {Input.B: b, Input.H: h, Input.Q_IDX: q_idx, Input.KV_IDX: kv_idx}
    if score is not None:
        inputs[Input.SCORE] = score
    result = evaluate(trace.graph.root, Env(inputs, trace.values, torch, torch.float32))
    return torch.as_tensor(result).expand(shape)
