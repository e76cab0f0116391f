"""`attention`: check the arguments, trace the mods, choose a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch

from flexc import operators
from flexc.backends import ON_GPU, choose
from flexc.call import AttentionCall
from flexc.check import (
    check_block_map,
    check_captures,
    check_dropout,
    check_gradients_exist,
    check_is_tensor,
    check_options,
    check_out,
    check_reads,
    check_scale,
    check_sinks,
    check_tensors,
)
from flexc.errors import UnsupportedFeature
from flexc.execute import in_autocast_dtype, new_seed, readable, run
from flexc.positions import check_positions
from flexc.prepared import Place
from flexc.provenance import without_own_map
from flexc.replay import replay
from flexc.resolve import resolve

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from flexc.block_mask import BlockMask


OPERATORS = operators.NAMES
"""What `torch.ops.flexc` holds, from the first use of this module on."""


class _Arguments(TypedDict, total=False):
    """The keywords of `attention` that do not change the type of its result."""

    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | None
    block_mask: BlockMask | TorchBlockMask | None
    scale: float | None
    sinks: torch.Tensor | None
    dropout_p: float
    deterministic: bool
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None
    out: torch.Tensor | None
    backend: str
    options: Mapping[str, object] | None


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **arguments: Unpack[_Arguments],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[_Arguments],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **arguments: Unpack[_Arguments],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | TorchBlockMask | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    options: Mapping[str, object] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with the user's own mask and score functions.

    Has gradients with regard to q, k, v, the sinks, and every floating tensor that `score_mod` captures, from
    those of the output and the lse.

    Args:
        q: (B, Hq, L, D), bf16, fp16, fp32, or fp64 on the CPU.
        k: (B, Hkv, S, D); `Hq % Hkv == 0`. May be of a lower precision than q.
        v: (B, Hkv, S, Dv). Any strides whose last dimension is contiguous are read in place.
        mask_mod: `f(b, h, q_idx, kv_idx) -> bool`, True where a pair may attend. flexc finds its blocks, anew
            where a captured tensor was written in place; writes that autograd can't see (through `.data`, or
            an array of numpy) go unnoticed.
        score_mod: `f(score, b, h, q_idx, kv_idx) -> score`; score is `q . k * scale`, fp32. Masks come after.
        block_mask: blocks found before, of flexc or of PyTorch. With `mask_mod` as well, both apply.
        scale: of the scores; `1 / sqrt(D)` by default.
        sinks: (Hq,) logits, one a head, that take part in the softmax and have no value.
        dropout_p: probability that a weight is dropped, rounded to a multiple of 2**-16; the others are
            divided by what is left of 1. Drawn anew at each call, as `torch.manual_seed` decides; the lse is
            that without dropout.
        return_lse: also return the natural logarithm of the sum of exponentials, (B, Hq, L) fp32.
        deterministic: gradients are the same bits from run to run; the output always is. So they are under
            `torch.use_deterministic_algorithms(True)`.
        k_scale: scale of an fp8 k; not in this version.
        v_scale: scale of an fp8 v; not in this version.
        q_scale: scale of an fp8 q; not in this version.
        out: (B, Hq, L, Dv), written in place of a new tensor.
        backend: "auto" (by device), "triton" (CUDA), "hopper" (CUDA, sm90), "cpu" (block-sparse), "reference"
            (dense, for tests).
        options: overrides of the kernel's plan, e.g. `{"block_q": 64}`: those that `flexc.compile` lists.

    Returns:
        out (B, Hq, L, Dv) in the dtype of q, and lse with `return_lse`. A row that may attend to no key has
        out 0 and lse -inf (with a sink: lse = sink).

    Raises:
        FlexcError: one subclass a mistake, before anything is launched.
    """
    if k_scale is not None or v_scale is not None or q_scale is not None:
        raise UnsupportedFeature(
            "q_scale, k_scale and v_scale belong to fp8 inputs, which this version does not take",
            hint="pass bf16, fp16 or fp32 tensors",
        )
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_dynamo_compiling():
        return _compiled(
            q, k, v, out, return_lse=return_lse,
            mask_mod=mask_mod, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=sinks,
            dropout_p=dropout_p, deterministic=deterministic, backend=backend, options=options,
        )  # fmt: skip
    place: Place | None = None
    if out is None and backend in ON_GPU and isinstance(q, torch.Tensor) and q.is_cuda:
        repeated, place = replay(
            q,
            k,
            v,
            score_mod,
            mask_mod,
            block_mask,
            scale,
            sinks,
            return_lse,
            deterministic,
            options,
            backend,
            dropout_p,
        )
        if repeated is not None:
            return repeated if return_lse else repeated[0]  # type: ignore[return-value]
    call = _checked(
        q, k, v, out, return_lse=return_lse,
        mask_mod=mask_mod, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=sinks,
        dropout_p=dropout_p, deterministic=deterministic, options=options,
    )  # fmt: skip
    chosen = choose(backend, call.q.device)
    result, lse = run(
        without_own_map(call) if chosen in ON_GPU and block_mask is not None else call,
        chosen,
        place if call.q is q and call.k is k and call.v is v else None,
    )
    if not return_lse:
        return result
    if lse is None:
        raise AssertionError("a backend returned no lse")
    return result, lse


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    return_lse: bool,
    mask_mod: Callable[..., Any] | None,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | TorchBlockMask | None,
    scale: float | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    options: Mapping[str, object] | None,
) -> AttentionCall:
    """The call that was asked for. Raises one subclass of FlexcError a mistake."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    q, k, v = in_autocast_dtype(q, k, v)
    check_tensors(q, k, v)
    dropout_p = check_dropout(dropout_p)
    if sinks is not None:
        check_sinks(sinks, q)
    if out is not None:
        check_out(out, q, v)
    mods, values, block_map = resolve(score_mod, mask_mod, block_mask)
    if block_map is not None and block_mask is not None:
        batch, heads = block_mask.shape[:2]
        check_block_map(block_map.q_len, block_map.kv_len, batch, heads, q, k)
    if values:
        check_captures(tuple(c.name for c in mods.captures), values, q.device)
        check_reads(mods, values, q)
        if block_map is None:  # which may hide them
            check_positions(mods, values, q.shape[2], k.shape[2])
        check_gradients_exist(mods, values)
    return AttentionCall(
        q=readable(q),
        k=readable(k),
        v=readable(v),
        mods=mods,
        values=values,
        block_map=block_map,
        scale=check_scale(scale, q.shape[3]),
        sinks=sinks,
        return_lse=return_lse,
        out=out,
        allow_tf32=torch.backends.cuda.matmul.allow_tf32,
        options=check_options(options),
        dropout_p=dropout_p,
        dropout_seed=new_seed(q.device) if dropout_p else 0,
        deterministic=deterministic,
    )


def _compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, **rest: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` while torch.compile traces it."""
    from flexc import compiled

    q, k, v = in_autocast_dtype(q, k, v)
    result, lse = compiled.attention(q, k, v, **rest)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if rest["return_lse"] else result
