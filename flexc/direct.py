"""Calls of a kernel that the caller chose: the checks that choosing it for a call would have made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexc.artifact import Artifact
from flexc.call import Result
from flexc.callspec import is_aligned
from flexc.capture_fit import check_captures_fit
from flexc.check import (
    check_block_map,
    check_blocks,
    check_captures,
    check_closed_form,
    check_sinks,
    check_tensors,
)
from flexc.codegen.arguments import Source
from flexc.codegen.kernel_form import SHORT
from flexc.codegen.target import target_named
from flexc.errors import (
    BlockMaskMismatch,
    DeviceMismatch,
    LayoutMismatch,
    NotDifferentiable,
    ShapeMismatch,
    UnsupportedDtype,
    UnsupportedFeature,
    UnsupportedHeadDim,
    UnsupportedTarget,
)
from flexc.execute import new_seed, readable
from flexc.frontend.value import STORAGES, Value
from flexc.gpu_facts import target_of
from flexc.launch import Launch

if TYPE_CHECKING:
    from flexc.device_map import DeviceMap
    from flexc.ir.blockmap import BlockMap
    from flexc.kernel import Kernel


def run_kernel(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    values: tuple[Value, ...],
    block_map: BlockMap | DeviceMap | None,
    scale: float,
    sinks: torch.Tensor | None,
    dropout_p: float = 0.0,
) -> Result:
    """Launch `kernel`. See `Kernel.__call__`.

    Raises:
        FlexcError: what the kernel can't serve, before anything is launched.
    """
    check_tensors(q, k, v)
    check_asks_no_gradient(q, k, v, sinks, *values)
    if q.device.type != "cuda":
        raise DeviceMismatch(f"q is on {q.device}", hint="a compiled kernel runs on a GPU")
    artifact = kernel.artifact
    check_target(artifact.target, target_of(q.device.index).name)
    q, k, v = readable(q), readable(k), readable(v)
    check_fits(artifact, q, k, v, sinks)
    check_numbers_fit(artifact, scale, dropout_p)
    check_map_fits(artifact, q, k, block_map)
    check_captures(tuple(c.name for c in artifact.captures), values, q.device)
    check_captures_fit(artifact, values)
    check_closed_form(artifact.requires, values, q.shape[2], k.shape[2])
    if 0 in k.shape[:3] or 0 in q.shape[:3]:
        return without_keys(q, v, sinks, lse=kernel.returns_lse)
    return Launch(
        kernel,
        q,
        k,
        v,
        values=values,
        block_map=block_map,
        scale=scale,
        sinks=sinks,
        out=None,
        dropout_p=dropout_p,
        dropout_seed=new_seed(q.device) if dropout_p else 0,
    ).run()


def check_asks_no_gradient(*inputs: object) -> None:
    """Autograd is not to record the call, which it could not. Raises NotDifferentiable."""
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        raise NotDifferentiable(
            "an input requires a gradient, and a kernel that is called by itself records none",
            hint="call flexc.attention, which takes this kernel and those of its backward, "
            "or call the kernel under torch.no_grad()",
        )


def check_target(made_for: str, there: str) -> None:
    """Machine code for 8.x runs on later minor versions, that for newer generations on its own alone.

    Raises UnsupportedTarget.
    """
    needs, has = target_named(made_for).capability, target_named(there).capability
    if needs != has and not 80 <= needs < has < 90:
        raise UnsupportedTarget(
            f"the kernel was compiled for {made_for}, and the tensors are on a GPU of {there}",
            hint=f'flexc.compile(..., target="{there}")',
        )


def check_fits(
    artifact: Artifact, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """Element types, head dimensions, lengths, layouts and sinks are those that the kernel was compiled for.

    Raises UnsupportedDtype, UnsupportedHeadDim, ShapeMismatch, LayoutMismatch or UnsupportedFeature.
    """
    takes = {a.source: a for a in artifact.arguments}
    for name, x, source in (("q", q, Source.Q), ("k", k, Source.K), ("v", v, Source.V)):
        made_for = takes[source].type
        if made_for != f"*{STORAGES[x.dtype].value}":
            raise UnsupportedDtype(f"the kernel was made for {name} of type {made_for[1:]}, not {x.dtype}")
    for name, size, of in (
        ("q and k", q.shape[3], artifact.head_dim),
        ("v", v.shape[3], artifact.head_dim_v),
    ):
        if size != of:
            raise UnsupportedHeadDim(
                f"the kernel was made for {name} of head_dim {of}, not {size}",
                hint="flexc.compile(head_dim=..., head_dim_v=...) makes one for others",
            )
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] >= SHORT:
            raise ShapeMismatch(
                f"the kernel counts positions below {SHORT}, where floats keep each; {name} has {x.shape[2]}",
                hint="call flexc.attention, which takes a kernel for any length",
            )
    group = q.shape[1] // max(k.shape[1], 1)
    if 1 < artifact.packed_heads < group:
        raise ShapeMismatch(
            f"the kernel was made for up to {artifact.packed_heads} query heads that share keys; q has "
            f"{group} for each head of k",
            hint=f"flexc.compile(..., q_len={q.shape[2]}, group={group})",
        )
    for name, x, source in (("q", q, Source.Q), ("k", k, Source.K), ("v", v, Source.V)):
        if takes[source].divisible and x.numel() and not is_aligned(x):
            raise LayoutMismatch(
                f"the kernel reads rows that start at multiples of 16 bytes; {name} has strides {x.stride()} "
                f"and starts {x.data_ptr() % 16} bytes past one",
                hint=f"pass {name}.contiguous() or {name}.clone(), or call flexc.attention, which takes a "
                "kernel that fits",
            )
    if (Source.SINKS in takes) != (sinks is not None):
        raise UnsupportedFeature(
            "the kernel was compiled without sinks" if sinks is not None else "the kernel takes sinks",
            hint="flexc.compile(..., sinks=True)"
            if sinks is not None
            else f"pass sinks of shape ({q.shape[1]},)",
        )
    if sinks is not None:
        check_sinks(sinks, q)


def check_numbers_fit(artifact: Artifact, scale: float, dropout_p: float) -> None:
    """The scale is positive, and weights are dropped if and only if the kernel does that.

    Raises UnsupportedFeature.
    """
    if not scale > 0:
        raise UnsupportedFeature(
            f"the kernel was made for scales above 0, and scale is {scale}",
            hint="call flexc.attention, which takes a kernel for any scale",
        )
    drops = any(a.source is Source.DROPOUT_SEED for a in artifact.arguments)
    if drops != (dropout_p > 0):
        raise UnsupportedFeature(
            "the kernel was compiled with dropout" if drops else "the kernel was compiled without dropout",
            hint="pass dropout_p=, above 0" if drops else "flexc.compile(..., dropout=True)",
        )


def check_map_fits(
    artifact: Artifact, q: torch.Tensor, k: torch.Tensor, block_map: BlockMap | DeviceMap | None
) -> None:
    """There is a block map if and only if the kernel walks one, and it fits tensors and tiles.

    Raises BlockMaskMismatch.
    """
    walks = any(a.source is Source.MAP_STRETCHES for a in artifact.arguments)
    if walks != (block_map is not None):
        raise BlockMaskMismatch(
            "the kernel visits the blocks of a block mask"
            if walks
            else "the kernel takes no block mask: it visits all blocks, or computes those of its own mask",
            hint="pass block_mask=mask.block_mask(...)" if walks else "leave out block_mask",
        )
    if block_map is not None:
        if artifact.packed_heads > 1 and block_map.heads > 1:
            raise BlockMaskMismatch(
                "the tiles of the kernel have rows of several heads, and heads of the block mask differ",
                hint="flexc.compile without q_len",
            )
        check_block_map(block_map.q_len, block_map.kv_len, block_map.batch, block_map.heads, q, k)
        check_blocks((block_map.block_q, block_map.block_kv), (artifact.block_q, artifact.block_kv))


def without_keys(q: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *, lse: bool) -> Result:
    """The result of rows that see no key, or of no rows at all; TMA has no empty tensors."""
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    if not lse:
        return out, None
    sums = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    return out, sums if sinks is None else sums.copy_(sinks.float()[:, None])
