"""Gradients by PyTorch's autograd through the dense reference: in fp64, and in the dtype of the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexc import reference
from flexc.call import AttentionCall, Gradients
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.ops import Input
from flexc.reference import dense
from flexc.resolve import resolve
from tests.oracle import assert_close_to_golden


@dataclass(frozen=True)
class Problem:
    """A call, and the gradients that come in for its results."""

    call: AttentionCall
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None


def problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    with_lse: bool = False,
    **facts: Any,
) -> Problem:
    """A call with random gradients of its results."""
    mods, values, block_map = resolve(score_mod, mask_mod, block_mask)
    options = tuple(sorted(facts.pop("options", {}).items()))
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        mods=mods,
        values=values,
        block_map=block_map,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
        sinks=sinks,
        return_lse=True,
        out=None,
        allow_tf32=False,
        options=options,
        **facts,
    )
    grad_out = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    return Problem(call, grad_out, torch.randn(q.shape[:3], device=q.device) if with_lse else None)


def differentiable_slots(call: AttentionCall) -> tuple[int, ...]:
    """Slots of captured floating tensors."""
    return tuple(
        slot for slot, x in enumerate(call.values) if isinstance(x, torch.Tensor) and x.is_floating_point()
    )


def gradients(given: Problem, dtype: torch.dtype | None) -> dict[str | int, torch.Tensor]:
    """Every gradient of a problem by autograd; computed in `dtype`, or as plain PyTorch would."""
    call = given.call
    used = [x.detach().to(dtype or x.dtype).clone() for x in (call.q, call.k, call.v)]
    if dtype is None:
        used = [x.to(call.q.dtype) for x in used]
    slots = differentiable_slots(call)
    values = list(call.values)
    for slot in slots:
        x = call.values[slot]
        assert isinstance(x, torch.Tensor)
        values[slot] = x.detach().to(dtype or x.dtype).clone().requires_grad_()
    sinks = (
        None
        if call.sinks is None
        else call.sinks.detach().to(dtype or call.sinks.dtype).clone().requires_grad_()
    )
    for x in used:
        x.requires_grad_()
    q, k, v = used
    changed = replace(call, q=q, k=k, v=v, values=tuple(values), sinks=sinks)
    with torch.enable_grad():
        out, lse = dense(changed, product=None if dtype else call.q.dtype)
        finite = lse.isfinite()
        total = (out.double() * given.grad_out.double()).sum()
        if given.grad_lse is not None:
            total = total + (torch.where(finite, lse, 0.0).double() * given.grad_lse.double()).sum()
    leaves: dict[str | int, torch.Tensor] = {"q": q, "k": k, "v": v}
    leaves.update({slot: x for slot, x in enumerate(values) if slot in slots and isinstance(x, torch.Tensor)})
    if sinks is not None:
        leaves["sinks"] = sinks
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def _rounding(given: Problem, lse: torch.Tensor) -> dict[str | int, float]:
    """What rounding in fp32 makes of the sums that a gradient is, at its largest entry.

    A weight is `exp(score - lse)`: an error in the last place of these is a relative one of the weight. And
    `dP - delta`, which may cancel, has the error of its terms. The sums are those of absolute values.
    """
    call = given.call
    q, k, v, weights = (x.detach().double() for x in (call.q, call.k, call.v, given.grad_out))
    batch, kv_heads, kv_len, dim = k.shape
    shape = (batch, kv_heads, q.shape[1] // kv_heads, q.shape[2], kv_len)
    inputs = reference._inputs(shape, q.device)
    slots = differentiable_slots(call)
    values = [
        x.detach().double().requires_grad_() if n in slots and isinstance(x, torch.Tensor) else x
        for n, x in enumerate(call.values)
    ]
    with torch.enable_grad():
        scores = (q.reshape(*shape[:4], dim) @ k[:, :, None].transpose(-2, -1)) * call.scale
        scores = scores.requires_grad_()
        modified = scores
        if call.score is not None:
            env = Env({**inputs, Input.SCORE: scores}, values, torch, torch.float64)
            modified = evaluate(call.score, env).expand(shape)
    visible = reference._visible(call, inputs, shape, torch.float64) & modified.isfinite()
    weight = torch.where(visible, (modified - lse.reshape(*shape[:4], 1)).exp(), 0.0).nan_to_num().detach()
    upstream = weights.abs().reshape(*shape[:4], weights.shape[3])
    product = upstream @ v.abs()[:, :, None].transpose(-2, -1)
    delta = (weight * product).sum(-1, keepdim=True)
    if given.grad_lse is not None:
        delta = delta + given.grad_lse.double().abs().reshape(delta.shape)
    captured = [values[slot] for slot in slots]
    leaves = [scores, *(x for x in captured if isinstance(x, torch.Tensor))]
    upper = (weight * (product + delta)).nan_to_num()
    found: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if modified.requires_grad:
        found = torch.autograd.grad(modified, leaves, upper, allow_unused=True)
    size = torch.zeros_like(weight) if found[0] is None else found[0].abs() * abs(call.scale)
    sums: dict[str | int, torch.Tensor | None] = {
        "q": size @ k.abs()[:, :, None],
        "k": (size.transpose(-2, -1) @ q.abs().reshape(*shape[:4], dim)).sum(2),
        "v": (weight.transpose(-2, -1) @ upstream).sum(2),
        **dict(zip(slots, found[1:], strict=True)),
    }
    if call.sinks is not None:
        sink = call.sinks.detach().double().reshape(1, *shape[1:3], 1)
        sums["sinks"] = ((sink - lse.reshape(*shape[:4])).exp().nan_to_num() * delta[..., 0]).sum((0, 3))
    seen = torch.where(visible, modified, 0.0)
    largest = max(_largest(seen.detach()), _largest(lse))
    return {
        name: torch.finfo(torch.float32).eps * (1 + largest) * _largest(x)
        for name, x in sums.items()
        if x is not None
    }


def _largest(x: torch.Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def check_gradients(given: Problem, actual: Gradients, names: tuple[str | int, ...]) -> None:
    """Fails where a gradient breaks the tolerance rule."""
    golden, plain = gradients(given, torch.float64), gradients(given, None)
    call = given.call
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    rounding = _rounding(given, dense(wide)[1].detach())
    for name in names:
        found = actual.values[name] if isinstance(name, int) else getattr(actual, name)
        assert found is not None, name
        try:
            assert_close_to_golden(found, golden[name], plain[name], round_off=rounding.get(name, 0.0))
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None
