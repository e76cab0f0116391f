"""Dense attention by the definition: the oracle of every other backend. Plain PyTorch, so autograd works.

Scores `q . k * scale`, then the score_mod, then the mask, then the softmax with the sinks; all of (L, S) is
held.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from flexc.call import AttentionCall, Gradients, Result
from flexc.device_map import on_host
from flexc.execute import is_mapped
from flexc.ir.blockmap import BlockMap, TileKind
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.guard import guarded
from flexc.ir.ops import Input
from flexc.philox import kept, survivors_weight
from flexc.weigh_values import weigh_mapped_values, weigh_values


def run(call: AttentionCall) -> Result:
    """Attention of the call in fp32 (fp64 for fp64 queries), rounded once to the dtype of q.

    Returns out (B, Hq, L, Dv) and lse (B, Hq, L), fp32 (fp64 for fp64 queries), or None where it is not asked
    for.
    """
    with torch.autocast(call.q.device.type, enabled=False):
        out, lse = dense(call)
    if call.out is not None:
        out = call.out.copy_(out)
    return out, lse if call.return_lse else None


def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wanted: frozenset[str | int],
) -> Gradients:
    """The gradients of `run`, by PyTorch's autograd of the dense definition computed again."""
    named = {"q": call.q, "k": call.k, "v": call.v, "sinks": call.sinks}
    leaves: dict[str | int, torch.Tensor] = {}
    for name in wanted:
        x = named[name] if isinstance(name, str) else call.values[name]
        assert isinstance(x, torch.Tensor)
        leaves[name] = x.detach().requires_grad_()
    values = tuple(leaves.get(slot, value) for slot, value in enumerate(call.values))
    again = replace(
        call,
        q=leaves.get("q", call.q),
        k=leaves.get("k", call.k),
        v=leaves.get("v", call.v),
        sinks=leaves.get("sinks", call.sinks),
        values=values,
        return_lse=True,
        out=None,
    )
    with torch.enable_grad(), _recording():
        results = run(again)
    grads = (grad_out, grad_lse)
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r is not None and g is not None]
    names = list(leaves)
    found = torch.autograd.grad(
        [r for r, _ in pairs], [leaves[n] for n in names], [g for _, g in pairs], allow_unused=True
    )
    by_name = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, found, strict=True)}
    return Gradients(
        q=by_name.get("q"),
        k=by_name.get("k"),
        v=by_name.get("v"),
        sinks=by_name.get("sinks"),
        values=tuple(by_name.get(slot) for slot in range(len(values))),
    )


def _recording() -> AbstractContextManager[None]:
    """Autograd records, also inside an operator, where PyTorch has already been past it."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        hidden = hidden.remove(key)
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), hidden
    )
    return guard


def dense(call: AttentionCall, product: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Hq, L, Dv) in the dtype of q, and lse (B, Hq, L).

    `product` is the dtype of the two matrix products and their results; everything between is fp32 (fp64 for
    fp64 queries), which is also the default. With the dtype of q it is what plain PyTorch computes.
    """
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    product = dtype if product is None else product
    batch, heads, q_len, _ = call.q.shape
    kv_heads, kv_len = call.k.shape[1:3]
    shape = (batch, kv_heads, heads // kv_heads, q_len, kv_len)
    inputs = _inputs(shape, call.q.device)
    visible = _visible(call, inputs, shape, dtype)
    # What no row sees may hold anything: gone before it can meet a weight or a gradient of zero.
    unseen = ~visible.flatten(2, 3).any(2).unsqueeze(-1)
    k = call.k.to(product).masked_fill(unseen, 0.0)
    v = call.v.to(product).masked_fill(unseen, 0.0)
    q = call.q.to(product).reshape(batch, kv_heads, heads // kv_heads * q_len, call.q.shape[3])
    scores = (q @ k.transpose(-2, -1)).to(dtype).reshape(shape) * call.scale
    if call.score is not None:
        scores = _value(call, guarded(call.score), {**inputs, Input.SCORE: scores}, dtype).expand(shape)
    scores = torch.where(visible, scores, -math.inf)
    weights, lse = _softmax(scores, call.sinks)
    seen = scores != -math.inf
    if call.dropout_p:
        keep = _kept(call, inputs)
        weights, seen = torch.where(keep, weights * survivors_weight(call.dropout_p), 0.0), seen & keep
    weights = weights.to(product).flatten(2, 3)
    if is_mapped():
        out = weigh_mapped_values(weights, v, seen.flatten(2, 3))
    elif v.isfinite().all():
        out = weights @ v
    else:
        out = weigh_values(weights, v, seen.flatten(2, 3))
    out = out.reshape(batch, heads, q_len, call.v.shape[3]).to(call.q.dtype)
    return out, lse.reshape(batch, heads, q_len)


def _inputs(shape: tuple[int, ...], device: torch.device) -> dict[Input, torch.Tensor | int]:
    """What mods are called with, in shapes that broadcast over (batch, key head, group, row, column)."""
    batch, kv_heads, group, q_len, kv_len = shape
    return {
        Input.B: torch.arange(batch, dtype=torch.int32, device=device).view(-1, 1, 1, 1, 1),
        Input.H: torch.arange(kv_heads * group, dtype=torch.int32, device=device).view(kv_heads, group, 1, 1),
        Input.Q_IDX: torch.arange(q_len, dtype=torch.int32, device=device).view(-1, 1),
        Input.KV_IDX: torch.arange(kv_len, dtype=torch.int32, device=device),
        Input.Q_LEN: q_len,
        Input.KV_LEN: kv_len,
    }


def _kept(call: AttentionCall, inputs: dict[Input, torch.Tensor | int]) -> torch.Tensor:
    """Which pairs dropout keeps, to broadcast over (batch, key head, group, row, column)."""
    b, h, q_idx, kv_idx = (
        torch.as_tensor(inputs[i], device="cpu") for i in (Input.B, Input.H, Input.Q_IDX, Input.KV_IDX)
    )
    stream = b.to(torch.int64) * call.q.shape[1] + h
    return kept(int(call.dropout_seed), call.dropout_p, stream, q_idx, kv_idx).to(call.q.device)


def _value(
    call: AttentionCall, root: Expr, inputs: dict[Input, torch.Tensor | int], dtype: torch.dtype
) -> torch.Tensor:
    result: torch.Tensor = evaluate(root, Env(inputs, call.values, torch, dtype))
    return result


def _visible(
    call: AttentionCall, inputs: dict[Input, torch.Tensor | int], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Which pairs may attend, by the mask and by the user's block map: bool, expanded to `shape`."""
    visible = torch.ones((), dtype=torch.bool, device=call.q.device)
    if call.mask is not None:
        visible = visible & _value(call, call.mask, inputs, dtype)
    if call.block_map is not None:
        visible = visible & _listed(on_host(call.block_map), shape[1]).to(call.q.device)
    return visible.expand(shape)


def _listed(block_map: BlockMap, kv_heads: int) -> torch.Tensor:
    """The pairs in tiles that are not empty, to broadcast over (batch, key head, group, row, column)."""
    tiles = torch.stack(
        [
            torch.from_numpy(block_map.kinds(b, h)) != TileKind.EMPTY
            for b in range(block_map.batch)
            for h in range(block_map.heads)
        ]
    )
    rows = torch.arange(block_map.q_len, device="cpu") // block_map.block_q
    columns = torch.arange(block_map.kv_len, device="cpu") // block_map.block_kv
    pairs = tiles[:, rows][:, :, columns]
    heads = (1, 1) if block_map.heads == 1 else (kv_heads, block_map.heads // kv_heads)
    return pairs.view(block_map.batch, *heads, block_map.q_len, block_map.kv_len)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and the log of their normaliser; without keys, weights 0 and lse -inf (or the sink)."""
    sink = None
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:4], 1)
    logits = scores if sink is None else torch.cat([scores, sink], -1)
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], -math.inf)
    maximum = logits.detach().amax(-1, keepdim=True)
    maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    powers = (logits - maximum).exp()
    total = powers.sum(-1, keepdim=True)
    nothing = total == 0.0
    total = total.masked_fill(nothing, 1.0)
    lse = (maximum + total.log()).masked_fill(nothing, -math.inf).squeeze(-1)
    return (powers if sink is None else powers[..., :-1]) / total, lse
