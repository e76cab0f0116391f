"""How a checked call meets PyTorch: directly on a backend, or through the operator that autograd knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from flexc.backends import forward
from flexc.call import AttentionCall, Mods, Result
from flexc.errors import NotDifferentiable
from flexc.lru import LRU

if TYPE_CHECKING:
    from flexc.prepared import Place

PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_LEVEL = -1
"""Of forward-mode differentiation: it is not under way."""


def run(call: AttentionCall, backend: str, place: Place | None = None) -> Result:
    """The output and lse of a call on the backend of that name.

    The operator costs some time of the host, so only calls that something watches go through it: autograd, a
    checkpoint, a transform of torch.func, a fake tensor.
    """
    tensors = [x for x in (call.q, call.k, call.v, call.sinks, *call.values) if isinstance(x, torch.Tensor)]
    plain = not is_watched() and all(type(x) in PLAIN for x in tensors)
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if differentiates and call.out is not None:
        raise NotDifferentiable(
            "an input requires a gradient, and the result is written to out=",
            hint="leave out= away, or call it under torch.no_grad()",
        )
    if backend == "reference" and _is_transparent(call, tensors):
        return forward(call, backend, place)
    if plain and not differentiates:
        return forward(call, backend, place)
    if plain and place is not None:
        from flexc.prepared_step import prepare

        prepared = prepare(call, place, backend)
        if prepared is not None:
            return prepared
    return _through_operator(call, backend, differentiates)


def _is_transparent(call: AttentionCall, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether PyTorch may see the operators that the reference is made of, and so transform them by itself.

    Modes see one operator instead. So does vmap where there is dropout, whose seed is needed as a number.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or not all(type(x) in PLAIN for x in tensors):
        return False
    return not (call.dropout_p and is_mapped())


def is_mapped() -> bool:
    """Whether `torch.func.vmap` is at work, under which no number can be read from a tensor."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == _functorch.TransformType.Vmap for interpreter in stack)


def is_watched() -> bool:
    """Whether a mode, a transform or forward-mode differentiation of PyTorch wants to see every operator."""
    return (
        torch._C._len_torch_dispatch_stack() > 0 or is_transformed() or forward_ad._current_level != _NO_LEVEL
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return _functorch.peek_interpreter_stack() is not None


def has_tangents(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of them is a dual tensor of forward-mode differentiation. Those of torch.func hide it."""
    if forward_ad._current_level == _NO_LEVEL:
        return False
    duals = (forward_ad.unpack_dual(x) for x in tensors if x is not None)  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)


def _through_operator(call: AttentionCall, backend: str, differentiates: bool) -> Result:
    from flexc import operators
    from flexc.map_tensors import tensors_of
    from flexc.statement import split_values

    block_map = call.block_map
    text = statement_of(call, backend, call.return_lse or differentiates or is_transformed())
    out, lse = operators.attention(
        call.q,
        call.k,
        call.v,
        call.sinks,
        call.dropout_seed if isinstance(call.dropout_seed, torch.Tensor) else None,
        *split_values(call.captures, call.values),
        [] if block_map is None else tensors_of(block_map),
        call.scale,
        text,
    )
    return out if call.out is None else call.out.copy_(out), lse if call.return_lse else None


_texts: LRU[tuple[object, ...], tuple[Mods, str]] = LRU(1024)


def statement_of(call: AttentionCall, backend: str, returns_lse: bool) -> str:
    """What the operator is told of a call beside tensors and numbers; found by the identity of the mods."""
    from flexc.map_tensors import shape_of
    from flexc.statement import Statement, text_of

    blocks = None if call.block_map is None else shape_of(call.block_map)
    facts = (backend, returns_lse, call.options, call.dropout_p, call.deterministic, blocks)
    found = _texts.get((id(call.mods), *facts))
    if found is None:
        statement = Statement(call.score, call.mask, call.captures, *facts)
        found = (call.mods, text_of(statement, call.mods))  # holding the mods keeps their id theirs
        _texts.put((id(call.mods), *facts), found)
    return found[1]


def readable(x: torch.Tensor) -> torch.Tensor:
    """`x` itself when its last dimension is contiguous, else a copy."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def in_autocast_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in the dtype of autocast, where it is on for their device; fp64 stays, as in PyTorch."""
    device = q.device.type  # on others autocast does not exist, and asking for it is an error
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def new_seed(device: torch.device) -> torch.Tensor:
    """A seed of dropout, 0-dim int64 on `device`, from the device's generator. Waits for nothing."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
