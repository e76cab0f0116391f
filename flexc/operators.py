"""The operators `flexc::attention` and `flexc::attention_backward`, which PyTorch sees as one call each.

`torch.ops.flexc.attention.default` is the name for lists of what a checkpoint saves. Captured tensors, sinks
and the arrays of a block map are arguments, so autograd, fake tensors and functionalisation see them; all
that is static is one text (`flexc.statement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexc.backends import backward, choose, forward
from flexc.call import AttentionCall, Gradients
from flexc.device_map import Map
from flexc.execute import is_transformed, is_watched, readable
from flexc.frontend.value import Value
from flexc.map_tensors import map_of
from flexc.positions import check_positions
from flexc.statement import Statement, join_values, read

Tensors = Sequence[torch.Tensor]

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? seed, Tensor[] captures, SymInt[] integers, "
    "float[] floats, Tensor[] blocks, float scale, str statement"
)
_NAMED = ("q", "k", "v", "sinks")
_FIRST_CAPTURE = len(_NAMED)

NAMES = ("attention", "attention_backward")

_library: Any = torch.library.Library("flexc", "DEF")  # type: ignore[no-untyped-call]
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"attention({_INPUTS}) -> (Tensor out, Tensor lse)", tags=_tags)
_library.define(
    f"attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_INPUTS}, int[] wanted)"
    " -> Tensor[]",
    tags=_tags,
)


def call_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    captures: Tensors,
    integers: Sequence[int],
    floats: Sequence[float],
    blocks: Tensors,
    scale: float,
    text: str,
) -> tuple[AttentionCall, Statement]:
    """The call that these arguments of an operator are.

    One more tensor behind the captured ones holds the scale and the floats: torch.compile computes these.
    """
    statement, mods = read(text)
    read_tensors = sum(c.is_tensor for c in mods.captures)
    if len(captures) > read_tensors:
        scale, *floats = captures[read_tensors].tolist()
    values: tuple[Value, ...] = ()
    if mods.captures:
        values = join_values(mods.captures, captures, integers, floats)
    block_map: Map | None = None
    if statement.blocks is not None:
        block_map = map_of(list(blocks), statement.blocks, q, k)
    call = AttentionCall(
        q=readable(q),
        k=readable(k),
        v=readable(v),
        mods=mods,
        values=values,
        block_map=block_map,
        scale=scale,
        sinks=sinks,
        return_lse=statement.returns_lse,
        out=None,
        allow_tf32=torch.backends.cuda.matmul.allow_tf32,
        options=statement.options,
        dropout_p=statement.dropout_p,
        dropout_seed=0 if seed is None else seed,
        deterministic=statement.deterministic,
    )
    return call, statement


@torch.no_grad()
def compute(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on real tensors."""
    call, statement = call_of(*inputs)
    if call.values and call.block_map is None:
        check_positions(call.mods, call.values, call.q.shape[2], call.k.shape[2])
    out, lse = forward(call, choose(statement.backend, call.q.device))
    return out.contiguous(), _no_lse(call.q) if lse is None else lse.contiguous()


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((0,), dtype=lse_dtype(q))


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of an lse: fp32, and fp64 for fp64 queries."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    statement, _ = read(rest[-1])
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=lse_dtype(q)) if statement.returns_lse else _no_lse(q)


@torch.no_grad()
def compute_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> list[torch.Tensor]:
    """The backward on real tensors: one gradient for each of the last argument."""
    *inputs_, wanted = inputs
    call, statement = call_of(*inputs_)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    names = [name_of(call, place) for place in wanted]
    found = backward(
        call,
        choose(statement.backend, call.q.device),
        out,
        lse,
        readable(grad_out),
        grad_lse,
        frozenset(names),
    )
    return [_gradient(found, name) for name in names]


def name_of(call: AttentionCall, place: int) -> str | int:
    """What the backends call an argument: the first of `_NAMED`, then the captured tensors, each by slot."""
    if place < _FIRST_CAPTURE:
        return _NAMED[place]
    return [slot for slot, c in enumerate(call.captures) if c.is_tensor][place - _FIRST_CAPTURE]


def _gradient(found: Gradients, name: str | int) -> torch.Tensor:
    grad: torch.Tensor | None = getattr(found, name) if isinstance(name, str) else found.values[name]
    assert grad is not None
    return grad.contiguous()


def _fake_attention_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> list[torch.Tensor]:
    named = [*inputs[:_FIRST_CAPTURE], *inputs[_FIRST_CAPTURE + 1]]
    return [torch.empty_like(named[p], memory_format=torch.contiguous_format) for p in inputs[-1]]


def _recorded(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator where autograd may record it."""
    from flexc.differentiate import attend

    *named, captures, integers, floats, blocks, scale, text = inputs
    # An AOTInductor package leaves out lists that are empty.
    lists = (x or [] for x in (captures, integers, floats, blocks))
    return attend(*named, *lists, scale, text)


def _recorded_backward(*inputs: Any) -> list[torch.Tensor]:
    """The backward where autograd may record it: it has no derivative of its own."""
    from flexc.differentiate import differentiate

    return differentiate(*inputs)


_library.impl("attention", compute, "CompositeExplicitAutograd")
_library.impl("attention_backward", compute_backward, "CompositeExplicitAutograd")
_library.impl("attention", _recorded, "Autograd")
_library.impl("attention_backward", _recorded_backward, "Autograd")
torch.library.register_fake("flexc::attention", _fake_attention, lib=_library)
torch.library.register_fake("flexc::attention_backward", _fake_attention_backward, lib=_library)


def attention(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of `(q, k, v, sinks, seed, captures, integers, floats, blocks, scale, statement)`.

    Goes through PyTorch's dispatcher only where something watches it.
    """
    if is_transformed() or not is_watched():
        return _recorded(*inputs)
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.flexc.attention.default(*inputs)
    return results


def attention_backward(*inputs: Any) -> list[torch.Tensor]:
    """The gradients that the last argument counts: q, k, v, sinks (0 to 3), captured tensors (from 4).

    The others are the gradients of output and lse, output and lse, and the arguments of `attention`.
    """
    if is_transformed() or not is_watched():
        return _recorded_backward(*inputs)
    found: list[torch.Tensor] = torch.ops.flexc.attention_backward.default(*inputs)
    return found
