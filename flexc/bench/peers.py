"""Who is timed: each peer turns a case into a callable, or says why it can't."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexc.api import attention
from flexc.bench.cases import Case, Features, Problem

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class NotOffered(Exception):
    """A peer can't compute this case here; the message is the reason. The benchmark catches it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`prepare` may compile; it raises NotOffered when the peer does not have the case.

    `compiles` says that it keeps what it compiles on disk, so that another process can do it ahead.
    """

    name: str
    prepare: Callable[[Case, Problem], Run]
    compiles: bool = False
    only_backward: bool = False


def backward_of(run: Run, inputs: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Runs the forward now; the backward at each call, with q as the gradient that comes in."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = run(leaves[0], leaves[1], leaves[2])
    return partial(torch.autograd.grad, out, leaves, inputs[0], retain_graph=True)


def call_once(run: Run, inputs: Inputs, *, backward: bool) -> tuple[torch.Tensor, ...]:
    """The result of the forward, or the gradients of q, k and v."""
    return backward_of(run, inputs)() if backward else (run(*inputs),)


def _flexc(*, deterministic: bool = False) -> Callable[[Case, Problem], Run]:
    def prepare(case: Case, problem: Problem) -> Run:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, mask_mod=case.mask, score_mod=case.score, deterministic=deterministic)

        return run

    return prepare


def _torch_flex(case: Case, problem: Problem) -> Run:
    """At its best: compiled anew for every shape, with a block mask made outside the timing."""
    if problem.device.type != "cuda":
        raise NotOffered("compiled for GPUs only in this benchmark")
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A backward that is timed alone runs again and again over what its forward saved.
    config.donated_buffer = False
    torch.compiler.reset()  # else the ninth variant of a process runs uncompiled, dense
    block_mask = None
    if case.mask is not None:
        block_mask = create_block_mask(
            case.mask,
            problem.batch if case.per_batch else None,
            problem.heads if case.per_head else None,
            problem.length,
            problem.length,
            device=str(problem.device),
        )
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(q, k, v, score_mod=case.score, block_mask=block_mask)
        return out

    return run


def _sdpa(backend: SDPBackend) -> Callable[[Case, Problem], Run]:
    def prepare(case: Case, problem: Problem) -> Run:
        features = _features(case)
        if not features.is_plain:
            raise NotOffered("takes no windows and no score functions")
        if problem.device.type != "cuda" and backend is not SDPBackend.FLASH_ATTENTION:
            raise NotOffered("needs an NVIDIA GPU")

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=features.causal)

        return run

    return prepare


def _flash2(case: Case, problem: Problem) -> Run:
    features = _features(case)
    _require("flash_attn.flash_attn_interface", problem)
    from flash_attn import flash_attn_func

    window = (-1, -1) if features.window is None else (features.window - 1, 0)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn_func(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            causal=features.causal,
            window_size=window,
            softcap=features.softcap or 0.0,
            alibi_slopes=features.alibi_slopes,
        )
        return out.transpose(1, 2)

    return run


def _flash3(case: Case, problem: Problem) -> Run:
    _require("flash_attn_interface", problem)
    from flash_attn_interface import flash_attn_func

    return _flash_of(flash_attn_func, case, everything=-1)


def _flash_cute(case: Case, problem: Problem) -> Run:
    _require("flash_attn.cute", problem)
    from flash_attn.cute import flash_attn_func

    return _flash_of(flash_attn_func, case, everything=None)


def _flash_of(attend: Callable[..., Any], case: Case, *, everything: int | None) -> Run:
    """One of the functions that take (B, L, H, D); `everything` is its word for a window without a bound."""
    features = _features(case)
    if features.alibi_slopes is not None:
        raise NotOffered("takes no ALiBi slopes")
    window = (everything, everything) if features.window is None else (features.window - 1, 0)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: Any = attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            causal=features.causal,
            window_size=window,
            softcap=features.softcap or 0.0,
        )
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return run


def _features(case: Case) -> Features:
    if case.features is None:
        raise NotOffered("takes no functions")
    return case.features


def _require(module: str, problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise NotOffered("needs an NVIDIA GPU")
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotOffered("is not installed")


PEERS = (
    Peer("flexc", _flexc(), compiles=True),
    Peer("flexc-deterministic", _flexc(deterministic=True), compiles=True, only_backward=True),
    Peer("torch-flex", _torch_flex, compiles=True),
    Peer("sdpa-flash", _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("sdpa-cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer("flash-attn", _flash2),
    Peer("flash-attn-3", _flash3),
    Peer("flash-attn-cute", _flash_cute),
)
