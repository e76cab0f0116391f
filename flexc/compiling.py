"""`flexc.compile`: a kernel for a target, on any machine, before there are tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flexc.artifact import Artifact
from flexc.call import Mods
from flexc.callspec import unit_strides
from flexc.check import MAX_HEAD_DIM, check_options
from flexc.choice import Rows, design_named
from flexc.codegen.blocks import choose_blocks
from flexc.codegen.few_rows import FEW
from flexc.codegen.softmax_form import is_near_zero
from flexc.errors import ShapeMismatch, UnsupportedDtype, UnsupportedHeadDim
from flexc.frontend.value import STORAGES, Value
from flexc.ir.graph import ModSource
from flexc.ir.spec import AttentionSpec
from flexc.kernel import Kernel
from flexc.resolve import resolve

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compile(
    *,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    target: str = "sm90",
    backward: bool = False,
    return_lse: bool = False,
    sinks: bool = False,
    dropout: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    q_len: int | None = None,
    group: int = 1,
    options: Mapping[str, object] | None = None,
) -> Kernel:
    """Compile the attention kernel of these mods. No GPU is needed.

    Args:
        mask_mod: as in `flexc.attention`.
        score_mod: as in `flexc.attention`.
        head_dim: of q and k, 1 to 512.
        head_dim_v: of v; `head_dim` by default.
        dtype: of q, k, v and the result: bf16, fp16 or fp32.
        target: "sm80", "sm86", "sm89", "sm90", "sm100", "sm103" or "sm120".
        backward: also compile the kernels of the backward, with gradients of the captured tensors that
            require one. The forward then writes the log-sum-exp, which they read.
        return_lse: whether the kernel writes the log-sum-exp.
        sinks: whether it takes sinks.
        dropout: whether it drops weights, and with `backward` the backward with it; the probability is given
            at each call.
        deterministic: with `backward`, kernels whose gradients are the same bits from run to run; the output
            always is.
        backend: "auto", or the kernels of "triton" or "hopper".
        q_len: query rows of the calls that it is for. Few have tiles of their own, which calls with more rows
            can use too, but slowly. None for any number.
        group: with `q_len`, query heads that share keys and values; their rows may share a tile.
        options: overrides of the plan: block_q, block_kv, num_warps, num_stages, precision, fast_tanh,
            blocks ("map": from a block map, though the mask has a closed form), backward_fused (whether one
            kernel finds the gradients of q, k and v).

    Raises:
        FlexcError: what can't be traced, planned or compiled for.
    """
    from flexc.build import kernel_for

    checked = check_options(options)
    _check_rows(q_len, group)
    mods, values, _ = resolve(score_mod, mask_mod)
    spec = spec_for(
        mods,
        values,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        return_lse=return_lse or backward,
        sinks=sinks,
        dropout=dropout,
        blocks=dict(checked).get("blocks"),
    )
    rows = None if q_len is None else (q_len, group, 1)
    design, suited = design_named(backend, spec, target, checked, rows)
    kernel = kernel_for(suited, target, checked, mods.sources, design)
    parts = (
        _backward(spec, values, target, checked, mods.sources, backend, rows, deterministic=deterministic)
        if backward
        else ()
    )
    return Kernel(kernel.artifact, values, parts)


def _check_rows(q_len: int | None, group: int) -> None:
    for name, number in (("q_len", q_len), ("group", group)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ShapeMismatch(f"{name} is {number!r}", hint="a number of at least 1")


def spec_for(
    mods: Mods,
    values: tuple[Value, ...],
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    sinks: bool = False,
    dropout: bool = False,
    blocks: object = None,
) -> AttentionSpec:
    """The spec of a kernel for any lengths, of mods that captured `values`; the rest as for `compile`.

    Raises:
        UnsupportedDtype, UnsupportedHeadDim: what no kernel takes.
    """
    if dtype not in _DTYPES:
        raise UnsupportedDtype(
            f"dtype is {dtype}", hint="one of torch.bfloat16, torch.float16, torch.float32"
        )
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not isinstance(size, int) or not 1 <= size <= MAX_HEAD_DIM:
            raise UnsupportedHeadDim(f"{name} is {size!r}", hint=f"head dimensions are 1 to {MAX_HEAD_DIM}")
    storage = STORAGES[dtype]
    return AttentionSpec(
        score=mods.score,
        mask=mods.mask,
        captures=mods.captures,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q_storage=storage,
        k_storage=storage,
        v_storage=storage,
        blocks=choose_blocks(mods.mask, values, given=False, lengths=None, wanted=blocks),
        has_sinks=sinks,
        return_lse=return_lse,
        allow_tf32=dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32,
        aligned=head_dim * storage.itemsize % 16 == 0 and head_dim_v * storage.itemsize % 16 == 0,
        unit_stride=unit_strides(values),
        bounded=is_near_zero(mods.score, ()),  # a captured number may be another in each call
        dropout=dropout,
    )


def _backward(
    spec: AttentionSpec,
    values: tuple[Value, ...],
    target: str,
    options: tuple[tuple[str, object], ...],
    sources: tuple[ModSource, ...],
    backend: str,
    rows: Rows | None,
    *,
    deterministic: bool,
) -> tuple[Artifact, ...]:
    from flexc.build_backward import backward_kernel_for
    from flexc.choice import backward_parts, why_portable_backward
    from flexc.codegen.backward_spec import backward_spec

    slots = tuple(n for n, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad)
    wanted = backward_spec(
        spec,
        values,
        None,
        wanted=dict(options).get("blocks"),
        slots=slots,
        deterministic=deterministic,
    )
    is_few = rows is not None and rows[0] < FEW
    hopper = backend != "triton" and not is_few and why_portable_backward(wanted, target, options) is None
    # One that is launched again, after repairs, is one kernel.
    parts = dict.fromkeys(backward_parts(wanted, target, options, hopper=hopper))
    return tuple(backward_kernel_for(of, entry, target, options, sources).artifact for of, entry in parts)
