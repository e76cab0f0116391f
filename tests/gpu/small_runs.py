"""Runs kernels of every kind once, at small sizes: for compute-sanitizer, which makes a GPU very slow.

    python tests/gpu/small_runs.py                                        # compiles into the kernel cache
    compute-sanitizer --tool memcheck python tests/gpu/small_runs.py      # or racecheck

Tensors are made on the CPU and lie in allocations of their own, so that little else is checked.

memcheck finds nothing (H200, compute-sanitizer 2025.3). racecheck of that version reports every number that
the loading warp leaves in shared memory for the others, though they wait for its arrival at an mbarrier: it
credits an arrival to the thread that executes it alone, and not to those that met that thread at a barrier
before, as Triton's arrivals do. It says the same of a CUDA kernel that does nothing else, until each of its
threads arrives by itself.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import flexc
from flexc import masks, scores

HEADS, KV_HEADS, Q_LEN, KV_LEN = 4, 2, 300, 333

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None, tuple[torch.Tensor, ...]]
"""A mask, a score function, and what they captured that has a gradient."""


def mods() -> dict[str, Mods]:
    """Those whose kernels differ: all tiles, ranges, a map; captures of rows and of pairs."""
    ids = (torch.arange(KV_LEN, dtype=torch.int32) // 70).cuda()
    slopes = torch.rand(HEADS).cuda().requires_grad_()
    table = torch.zeros(HEADS, Q_LEN + KV_LEN).cuda().requires_grad_()
    return {
        "none": (None, None, ()),
        "causal": (masks.causal, None, ()),
        "window": (masks.sliding_window(100), None, ()),
        "documents": (masks.document(ids) & masks.causal, None, ()),
        "alibi": (masks.causal, scores.alibi(slopes), (slopes,)),
        "softcap": (masks.causal, scores.softcap(20.0), ()),
        "bias": (None, scores.relative_bias(table), (table,)),
    }


def run(found: Mods, head_dim: int, *, backward: bool, **arguments: Any) -> None:
    """One forward, and its backward if it is wanted; a result that is no number is an error."""
    mask, score, captured = found
    shapes = ((HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN))
    q, k, v = (torch.randn(1, h, n, head_dim, dtype=torch.bfloat16).cuda() for h, n in shapes)
    for x in (q, k, v):
        x.requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        out: torch.Tensor = flexc.attention(q, k, v, mask_mod=mask, score_mod=score, **arguments)
    results = [out]
    if backward:
        ones = torch.ones(out.shape, dtype=out.dtype).cuda()
        results += torch.autograd.grad(out, (q, k, v, *captured), ones)
    torch.cuda.synchronize()
    assert all(bool(x.detach().cpu().isfinite().all()) for x in results)


def main() -> None:
    """Every mod at every head dimension, or a part of them."""
    parser = argparse.ArgumentParser()
    known = mods()
    parser.add_argument("--mods", default=",".join(known))
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--forward-only", action="store_true")
    chosen = parser.parse_args()
    for name in chosen.mods.split(","):
        for head_dim in map(int, chosen.head_dims.split(",")):
            for deterministic in (False,) if chosen.forward_only else (False, True):
                print(name, head_dim, "deterministic" if deterministic else "", flush=True)
                run(
                    known[name],
                    head_dim,
                    backward=not chosen.forward_only,
                    deterministic=deterministic,
                    backend=chosen.backend,
                )


if __name__ == "__main__":
    main()
