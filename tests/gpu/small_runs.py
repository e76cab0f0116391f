"""Runs kernels of every kind once, at small sizes: for compute-sanitizer, which makes a GPU very slow.

    python tests/gpu/small_runs.py                                        # compiles into the kernel cache
    compute-sanitizer --tool memcheck python tests/gpu/small_runs.py

For racecheck, kernels are changed a little, and what it reports is read by a program: see races.py.

Tensors are made on the CPU and lie in allocations of their own, so that little else is checked. Two programs
take all tiles of a forward: each takes tile after tile, and begins its rings anew.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import flexc
import flexc.launch
from flexc import masks, scores
from flexc.artifact import Artifact
from flexc.launcher import Launcher, recording
from tests.ptx_arrivals import assemble, of_every_thread, without_wait

HEADS, KV_HEADS, Q_LEN, KV_LEN = 4, 2, 300, 333
PROGRAMS = 2
"""Of a forward; there are 6 to 12 tiles of queries."""
NARROW, SMALL, WIDE = (64,), (64, 128), (192, 256)
VALUES = {192: 128}
"""Head dimensions of v where they are others than those of q."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call, and the kernels that it is here for."""

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    captured: tuple[torch.Tensor, ...] = ()
    """What the mods captured that has a gradient."""
    head_dims: tuple[int, ...] = SMALL
    q_len: int = Q_LEN
    backward: bool = True
    dtype: torch.dtype = torch.bfloat16
    unseen: int = 0
    """Keys at the end whose values are NaN: no query sees them."""
    arguments: dict[str, Any] = field(default_factory=dict)
    reaches: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By head dimension: words of kernels that have to be launched where sums may come in any order."""


def cases() -> dict[str, Case]:
    """Those whose kernels differ: all tiles, ranges, a map; captures of rows and of pairs; dimensions."""
    ids = (torch.arange(KV_LEN, dtype=torch.int32) // 70).cuda()
    slopes = torch.rand(HEADS).cuda().requires_grad_()
    table = torch.zeros(HEADS, Q_LEN + KV_LEN).cuda().requires_grad_()
    keys = torch.zeros(HEADS, KV_LEN).cuda().requires_grad_()
    wide = (*SMALL, *WIDE)
    rounds = ("tell(places",)
    alone = "gl.float32, [1, 2 * DQ_COLUMNS, 32]"  # dQ of one warpgroup
    parts = {192: ("dk_tail_desc",), 256: ("def accumulate_values", "def attention_backward_queries")}
    return {
        "none": Case(head_dims=wide, reaches={64: rounds, 128: ("have_grown", "take_turn(step"), **parts}),
        "causal": Case(masks.causal, head_dims=wide, reaches={64: (*rounds, "move_shift"), **parts}),
        "window": Case(
            masks.sliding_window(100),
            head_dims=wide,
            reaches={64: ("walk_start", alone), **parts},
        ),
        "far_window": Case(
            masks.sliding_window(257), head_dims=NARROW, reaches={64: ("async_copy.mbarrier_arrive",)}
        ),
        "documents": Case(
            masks.document(ids) & masks.causal,
            head_dims=wide,
            reaches={64: ("note_smem", "leave_rows", alone), 128: ("leave_rows",), **parts},
        ),
        "alibi": Case(
            masks.causal, scores.alibi(slopes), (slopes,), reaches={64: ("add_head(", "choose_shift")}
        ),
        "bias": Case(None, scores.relative_bias(table), (table,), reaches={64: ("diagonal_sums",)}),
        "keys": Case(masks.causal, lambda s, b, h, q, k: s + keys[h, k], (keys,)),
        "softcap": Case(masks.causal, scores.softcap(20.0), head_dims=wide, reaches={64: ("first_weights",)}),
        "large_cap": Case(masks.causal, scores.softcap(500.0)),
        "dropout": Case(masks.causal, arguments={"dropout_p": 0.2}, reaches={64: ("surviving",)}),
        "sinks": Case(masks.causal, arguments={"sinks": torch.zeros(HEADS).cuda()}),
        "few": Case(masks.causal, q_len=20, backward=False, reaches={64: ("HEAD_ROWS",)}),
        "one": Case(lambda b, h, q, k: k < 300, q_len=1, backward=False, reaches={128: ("HEAD_ROWS",)}),
        "pairs": Case(
            masks.causal,
            head_dims=(128,),
            dtype=torch.float32,
            arguments={"backend": "auto"},  # no Hopper forward takes fp32
            reaches={128: ("q_unit_desc", "k_unit_desc")},
        ),
        "unseen": Case(lambda b, h, q, k: (k <= q) & (k < 250), unseen=KV_LEN - 250),
    }


def run(case: Case, head_dim: int, **arguments: Any) -> list[Artifact]:
    """One forward, and its backward if it is wanted; a result that is no number is an error.

    Returns what was launched.
    """
    dim_v = VALUES.get(head_dim, head_dim)
    shapes = ((HEADS, case.q_len, head_dim), (KV_HEADS, KV_LEN, head_dim), (KV_HEADS, KV_LEN, dim_v))
    made = [torch.randn(1, *shape, dtype=case.dtype) for shape in shapes]
    if case.unseen:
        made[2][:, :, -case.unseen :] = float("nan")
    q, k, v = (x.cuda().requires_grad_(case.backward) for x in made)
    with torch.set_grad_enabled(case.backward), recording() as launched:
        out: torch.Tensor = flexc.attention(
            q, k, v, mask_mod=case.mask, score_mod=case.score, **{**arguments, **case.arguments}
        )
        results = [out]
        if case.backward:
            ones = torch.ones(out.shape, dtype=out.dtype).cuda()
            results += torch.autograd.grad(out, (q, k, v, *case.captured), ones)
    torch.cuda.synchronize()
    assert all(bool(x.detach().cpu().isfinite().all()) for x in results)
    for word in () if arguments.get("deterministic") else case.reaches.get(head_dim, ()):
        assert any(word in kernel.source for kernel in launched), f"no kernel has {word}"
    return launched


@contextmanager
def every_thread_arrives(without: int | None) -> Iterator[None]:
    """Kernels with mbarriers are assembled anew, see `of_every_thread`; the backward `without` a wait."""

    def begin(launcher: Launcher, artifact: Artifact) -> None:
        if "mbarrier.init" in artifact.ptx:
            ptx = of_every_thread(artifact.ptx)
            if without is not None and artifact.entry == "attention_backward":
                ptx = without_wait(ptx, without)
            artifact = replace(artifact, cubin=assemble(ptx))
        usual(launcher, artifact)

    usual = Launcher.__init__
    with patch.object(Launcher, "__init__", begin):
        yield


def hand_overs(kernel: Artifact) -> str:
    """The lines of a kernel in which Triton tells warps what to run: none has another access in these."""
    words = (f"def {kernel.entry}(", "    gl.warp_specialize(")
    lines = [n for n, line in enumerate(kernel.source.splitlines(), 1) if line.startswith(words)]
    return f"    hands over: {kernel.entry} {' '.join(map(str, lines))}"


def main() -> None:
    """Every case at every head dimension, or a part of them."""
    parser = argparse.ArgumentParser()
    known = cases()
    parser.add_argument("--mods", default=",".join(known))
    parser.add_argument("--head-dims", default="64,128,192,256")
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--orders", default="any,deterministic")
    parser.add_argument("--every-thread-arrives", action="store_true", help="for racecheck, see races.py")
    parser.add_argument("--without-wait", type=int, help="of the backward: a mistake, to be found")
    chosen = parser.parse_args()
    dims = tuple(map(int, chosen.head_dims.split(",")))
    form = every_thread_arrives(chosen.without_wait) if chosen.every_thread_arrives else nullcontext()
    with form, patch.object(flexc.launch, "processors", lambda index: PROGRAMS):
        for name in chosen.mods.split(","):
            case = known[name]
            if chosen.forward_only:
                case = replace(case, backward=False, reaches={})
            for head_dim, order in product(dims, chosen.orders.split(",")):
                if head_dim in case.head_dims:
                    print(name, head_dim, order, flush=True)
                    ran = run(case, head_dim, deterministic=order == "deterministic", backend=chosen.backend)
                    with_roles = [kernel for kernel in ran if "gl.warp_specialize(" in kernel.source]
                    print(*map(hand_overs, with_roles), sep="\n", flush=True)
    print("all ran", flush=True)


if __name__ == "__main__":
    main()
