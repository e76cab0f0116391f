"""Masks as functions: combinations of them, and the dense mask of one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from flexc.errors import NotAMod, SlicedBlockMask

MaskFunction = Callable[..., Any]
DeviceLike = torch.device | str | int


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """The mask under which every pair may attend."""
    return batch.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """The mask of the pairs that all of `mask_mods` allow; of none, every pair.

    Raises:
        NotAMod: one of them is not callable.
    """
    _check_callable(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_ones((), dtype=torch.bool)
        for mask in mask_mods:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """The mask of the pairs that any of `mask_mods` allows; of none, no pair.

    Raises:
        NotAMod: one of them is not callable.
    """
    _check_callable(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_zeros((), dtype=torch.bool)
        for mask in mask_mods:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return or_mask


def sliced_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask_mod of a sliced block mask: raises SlicedBlockMask."""
    raise SlicedBlockMask(
        "this block mask is a slice of another, and its mask_mod has not been set",
        hint="assign block_mask.mask_mod: the function of the first mask, with indices moved by the offset",
    )


def create_mask(
    mod_fn: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: DeviceLike | None = None,
) -> torch.Tensor:
    """The dense mask (B, H, Q_LEN, KV_LEN) of a mask_mod, or of where a score_mod does not give -inf: bool.

    `B` and `H` None count as 1. This is the one function that makes something of Q_LEN times KV_LEN: for
    looking at small masks, and for tests.

    Raises:
        NotAMod: `mod_fn` takes neither four nor five arguments.
        TraceError: it can't be traced.
    """
    from flexc.ir.evaluate import Env, evaluate
    from flexc.ir.ops import Input
    from flexc.mods import as_mask_mod, as_score_mod

    where = default_device() if device is None else torch.device(device)
    shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    inputs: dict[Input, Any] = {
        which: torch.arange(length, dtype=torch.int32, device=where).view(-1, *(1,) * (3 - axis))
        for axis, (which, length) in enumerate(
            zip((Input.B, Input.H, Input.Q_IDX, Input.KV_IDX), shape, strict=True)
        )
    }
    inputs |= {Input.Q_LEN: Q_LEN, Input.KV_LEN: KV_LEN}
    is_score = required_arguments(mod_fn) == 5
    if is_score:
        inputs[Input.SCORE] = torch.zeros((), device=where)
    trace = (as_score_mod(mod_fn) if is_score else as_mask_mod(mod_fn)).trace()
    value: torch.Tensor = evaluate(trace.graph.root, Env(inputs, trace.values, torch, torch.float32))
    visible = value != -math.inf if is_score else value
    return visible.to(where).expand(shape).contiguous()


def required_arguments(fn: MaskFunction) -> int:
    """4 for a mask_mod and 5 for a score_mod: the number of positional arguments without a default.

    Raises:
        NotAMod: it is another number, or `fn` is not callable.
    """
    _check_callable((fn,))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(fn).parameters.values()
    count = sum(p.default is inspect.Parameter.empty and p.kind in positional for p in parameters)
    if count not in (4, 5):
        raise NotAMod(
            f"{getattr(fn, '__name__', fn)!r} takes {count} arguments",
            hint="a mask_mod takes (b, h, q_idx, kv_idx), a score_mod (score, b, h, q_idx, kv_idx)",
        )
    return count


def default_device() -> torch.device:
    """Where PyTorch's own functions put a mask when no device is given: the accelerator, else the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _check_callable(mask_mods: tuple[object, ...]) -> None:
    for mask in mask_mods:
        if not callable(mask):
            raise NotAMod(
                f"a mask must be a function, not {type(mask).__name__}", hint="pass f(b, h, q_idx, kv_idx)"
            )
