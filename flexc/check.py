"""Checks of the tensors of an attention call. Nothing is launched before they have passed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from flexc.call import Mods
from flexc.codegen.plan import check_options as check_plan_options
from flexc.errors import (
    BlockMaskMismatch,
    DeviceMismatch,
    NotDifferentiable,
    OutsideClosedForm,
    ShapeMismatch,
    UnknownOption,
    UnsupportedDtype,
    UnsupportedFeature,
    UnsupportedHeadDim,
)
from flexc.ir.adjoint import obstacle
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import LONGEST, Ranges, Within

MAX_HEAD_DIM = 512
_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_WIDTH = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def check_is_tensor(name: str, x: object) -> None:
    """`x` is a tensor of PyTorch. Raises UnsupportedDtype."""
    if not isinstance(x, torch.Tensor):
        raise UnsupportedDtype(
            f"{name} must be a torch.Tensor, not {type(x).__name__}",
            hint=f"torch.as_tensor({name})" if hasattr(x, "__len__") else None,
        )


def check_closed_form(
    requires: tuple[Within, ...], values: Sequence[object], q_len: int, kv_len: int
) -> None:
    """The loop bounds that a compiled kernel computes hold for this call. Raises OutsideClosedForm."""
    if Ranges((), requires=requires).holds(values, q_len, kv_len):
        return
    for within in requires:
        value = values[within.slot]
        if not isinstance(value, int | float) or not within.holds(value, kv_len):
            raise OutsideClosedForm(
                f"the kernel was compiled for a captured number from {within.least} to {within.greatest}, "
                f"and is called with {value!r}",
                hint='compile it with options={"blocks": "map"}, and pass block_mask=mask.block_mask(...)',
            )
    raise OutsideClosedForm(
        f"the kernel computes its loop bounds for lengths up to {LONGEST}, not {q_len} and {kv_len}",
        hint='compile it with options={"blocks": "map"}, and pass block_mask=mask.block_mask(...)',
    )


def check_blocks(blocks: tuple[int, int], tiles: tuple[int, int]) -> None:
    """The tiles of a compiled kernel divide the blocks of a map (q, kv). Raises BlockMaskMismatch."""
    if blocks[0] % tiles[0] or blocks[1] % tiles[1]:
        raise BlockMaskMismatch(
            f"the block mask has blocks of {blocks}, the kernel was compiled for tiles of {tiles}",
            hint=f"make it with BLOCK_SIZE={tiles}, or multiples of these",
        )


def check_scale(scale: object, head_dim: int) -> float:
    """The factor of the scores: `scale`, or `1 / sqrt(head_dim)` for None.

    Raises UnknownOption, or NotDifferentiable for a tensor that asks for a gradient.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, torch.Tensor) and scale.numel() == 1:
        if scale.requires_grad and torch.is_grad_enabled():
            raise NotDifferentiable(
                "scale is a tensor that requires a gradient, and is taken as a number",
                hint="multiply by it in a score_mod, as flexc.scores.temperature does, or pass scale.item()",
            )
        return float(scale)
    try:
        return float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UnknownOption(f"scale is {scale!r}", hint="a number, or None for 1 / sqrt(D)") from None


def check_options(options: object) -> tuple[tuple[str, object], ...]:
    """The options in the order of their names.

    Raises UnknownOption for what is no mapping of names, and for what no plan of a kernel has.
    """
    if options is None:
        return ()
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise UnknownOption(f"options are {options!r}", hint='a dict of names, such as {"block_q": 64}')
    check_plan_options(options)
    return tuple(sorted(options.items()))


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Layouts, ranks, dtypes, devices and shapes of q, k and v.

    Raises ShapeMismatch, UnsupportedDtype, UnsupportedFeature, DeviceMismatch or UnsupportedHeadDim.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
        if x.is_nested:
            raise ShapeMismatch(
                f"{name} is a nested tensor",
                hint="pad it, or pack the sequences and mask with flexc.masks.document",
            )
        if x.layout is not torch.strided:
            raise UnsupportedFeature(f"{name} has the layout {x.layout}", hint=f"{name}.to_dense()")
        if x.dim() != 4:
            raise ShapeMismatch(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}",
                hint="pass (batch, heads, length, head_dim); x.unsqueeze(0) adds a batch of one",
            )
    _check_dtypes(q, k, v)
    if not q.device == k.device == v.device:
        raise DeviceMismatch(
            f"q, k and v are on {q.device}, {k.device} and {v.device}", hint="move them to one device"
        )
    _check_shapes(q, k, v)


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _FLOATS:
            raise UnsupportedDtype(
                f"{name} has dtype {x.dtype}", hint="use bfloat16, float16, float32 or float64"
            )
    if q.dtype == k.dtype == v.dtype:
        return
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype and _WIDTH[x.dtype] >= _WIDTH[q.dtype]:
            raise UnsupportedDtype(
                f"q is {q.dtype} and {name} is {x.dtype}: k and v may only be of a lower precision than q",
                hint=f"cast with {name}.to({q.dtype})",
            )


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    batch, heads, _, dim = q.shape
    kv_batch, kv_heads, _, k_dim = k.shape
    if k_dim != dim:
        raise ShapeMismatch(
            f"q has head_dim {dim} and k has {k_dim}", hint="q and k need the same last dimension"
        )
    for names, size in (("q and k have", dim), ("v has", v.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise UnsupportedHeadDim(
                f"{names} head_dim {size}", hint=f"head dimensions are 1 to {MAX_HEAD_DIM}"
            )
    if v.shape[:3] != k.shape[:3]:
        raise ShapeMismatch(
            f"k is {tuple(k.shape)} and v is {tuple(v.shape)}",
            hint="k and v need the same batch, heads and length; only the last dimension may differ",
        )
    if kv_batch != batch:
        raise ShapeMismatch(
            f"q has batch {batch} and k has {kv_batch}",
            hint=f"k.expand({batch}, -1, -1, -1) shares one without a copy",
        )
    if heads == 0 or kv_heads == 0 or heads % kv_heads != 0:
        raise ShapeMismatch(
            f"q has {heads} heads and k has {kv_heads}",
            hint="the query heads must be a multiple of the kv heads, which are 1 or more",
        )


def check_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    """`sinks` is a floating (Hq,) tensor on the device of q."""
    check_is_tensor("sinks", sinks)
    if tuple(sinks.shape) != (q.shape[1],):
        raise ShapeMismatch(
            f"sinks has shape {tuple(sinks.shape)}; q has {q.shape[1]} heads",
            hint=f"pass shape ({q.shape[1]},)",
        )
    if not sinks.is_floating_point():
        raise UnsupportedDtype(f"sinks has dtype {sinks.dtype}", hint="sinks are floating-point logits")
    if sinks.device != q.device:
        raise DeviceMismatch(
            f"sinks is on {sinks.device}, q on {q.device}", hint=f"sinks.to({str(q.device)!r})"
        )


def check_out(out: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> None:
    """`out` can take the result: (B, Hq, L, Dv), dtype and device of q, last dimension contiguous."""
    check_is_tensor("out", out)
    shape = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != shape:
        raise ShapeMismatch(f"out has shape {tuple(out.shape)}", hint=f"the result has shape {shape}")
    if out.dtype != q.dtype:
        raise UnsupportedDtype(f"out has dtype {out.dtype}", hint=f"the result has the dtype of q, {q.dtype}")
    if out.device != q.device:
        raise DeviceMismatch(f"out is on {out.device}, q on {q.device}", hint=f"allocate it on {q.device}")
    if out.stride(3) != 1 and out.shape[3] > 1:
        raise ShapeMismatch(
            "out is not contiguous in its last dimension", hint="allocate it with torch.empty"
        )


def check_captures(names: tuple[str, ...], values: tuple[object, ...], device: torch.device) -> None:
    """Captured tensors lie on the device of q; a 0-dim tensor may also lie on the CPU."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.device == device:
            continue
        if value.dim() == 0 and value.device.type == "cpu":
            continue
        raise DeviceMismatch(
            f"the captured tensor {name!r} is on {value.device}, q is on {device}",
            hint=f"{name}.to({str(device)!r})",
        )


def check_reads(mods: Mods, values: tuple[object, ...], q: torch.Tensor) -> None:
    """A captured tensor that is read at `b` or `h` has an entry for every batch or query head.

    Reads at other indices may be out of range where the mask hides them.
    """
    lengths = {Input.B: q.shape[0], Input.H: q.shape[1]}
    for slot, dimension, index in _reads_of_batch_or_head(mods.score, mods.mask):
        value = values[slot]
        if isinstance(value, torch.Tensor) and value.shape[dimension] < lengths[index]:
            name, what = mods.captures[slot].name, "batch" if index is Input.B else "query head"
            raise ShapeMismatch(
                f"the captured tensor {name!r} has shape {tuple(value.shape)} and is read at "
                f"{index.value} in dimension {dimension}, but q has {lengths[index]} "
                f"{'batches' if index is Input.B else 'heads'}",
                hint=f"give it one entry a {what}",
                span=mods.read_at(slot),
            )


@lru_cache(maxsize=256)
def _reads_of_batch_or_head(*roots: Expr | None) -> tuple[tuple[int, int, Input], ...]:
    """Slot, dimension and input of every read whose index is `b` or `h` itself."""
    found = set()
    for node in topological(*(root for root in roots if root is not None)):
        if node.op is Op.LOAD and isinstance(node.attr, int):
            for dimension, index in enumerate(node.args):
                if index.op is Op.INPUT and index.attr in (Input.B, Input.H):
                    found.add((node.attr, dimension, index.attr))
    return tuple(sorted(found, key=str))


def check_gradients_exist(mods: Mods, values: tuple[object, ...]) -> None:
    """A captured tensor that asks for a gradient while autograd records can get one.

    Raises NotDifferentiable for one that is read by the mask alone, or by the score_mod only in ways that
    have no derivative.
    """
    if not torch.is_grad_enabled():
        return
    asking = {slot: x for slot, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad}
    obstacles = {slot: _obstacle(mods, slot) for slot in asking}
    reached = {id(asking[slot]) for slot, why in obstacles.items() if why is None}
    for slot, why in obstacles.items():
        if why is not None and id(asking[slot]) not in reached:
            name = mods.captures[slot].name
            raise NotDifferentiable(
                f"the captured tensor {name!r} requires a gradient, but {why}",
                hint=f"capture {name}.detach() if it needs none",
                span=mods.read_at(slot),
            )


@lru_cache(maxsize=256)
def _obstacle(mods: Mods, slot: int) -> str | None:
    """Why the capture in `slot` can't have a gradient; None where it can, or is not read at all."""

    def reads(root: Expr | None) -> bool:
        return root is not None and any(
            node.op is Op.LOAD and node.attr == slot for node in topological(root)
        )

    if mods.score is not None and reads(mods.score):
        why = obstacle(mods.score, slot)
        return None if why is None else f"it {why}"
    if reads(mods.mask):
        return "only the mask reads it, and a mask is true or false"
    return None


def check_dropout(probability: object) -> float:
    """The probability as a float. Raises UnknownOption for what is none."""
    if isinstance(probability, (int, float)) and not isinstance(probability, bool) and 0 <= probability <= 1:
        return float(probability)
    raise UnknownOption(f"dropout_p is {probability!r}", hint="a probability, from 0 to 1")


def check_block_map(
    q_len: int, kv_len: int, batch: int, heads: int, q: torch.Tensor, k: torch.Tensor
) -> None:
    """A block map's lengths are the tensors', its batch and heads 1 or the tensors'."""
    if (q_len, kv_len) != (q.shape[2], k.shape[2]):
        raise BlockMaskMismatch(
            f"the block mask was made for lengths ({q_len}, {kv_len}), the tensors have "
            f"({q.shape[2]}, {k.shape[2]})",
            hint="make it anew for these lengths, or pass only mask_mod and let flexc find the blocks",
        )
    for name, made_for, actual in (("batch", batch, q.shape[0]), ("heads", heads, q.shape[1])):
        if made_for not in (1, actual):
            raise BlockMaskMismatch(
                f"the block mask has {name} {made_for}, the tensors have {actual}",
                hint=f"make it with {actual}, or with None where the mask does not depend on it",
            )
