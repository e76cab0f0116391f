"""Compiles all that a benchmark will run, side by side, into the caches that its own process then reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexc.bench.apart import run_apart
from flexc.bench.cells import Plan
from flexc.bench.peers import PEERS, NotOffered, Peer, call_once
from flexc.errors import FlexcError, InternalError


@dataclass(frozen=True, slots=True)
class Job:
    """One peer in one cell."""

    plan: Plan
    peer: str


def get_ready(
    plans: Sequence[Plan],
    peers: Sequence[Peer],
    *,
    workers: int | None = None,
    seconds: float = float("inf"),
    progress: Callable[[Job], None] = lambda job: None,
) -> dict[Job, str]:
    """Runs each peer that compiles once in each cell, in other processes, for `seconds` at most.

    Kernels come to lie in flexc's cache and in PyTorch's on disk. A kernel that fails, hangs or never ends
    does so here, and not where times are taken.

    Returns:
        Why, for what can't be timed.
    """
    jobs = [
        Job(plan, peer.name)
        for plan in plans
        for peer in peers
        if peer.compiles and (plan.backward or not peer.only_backward)
    ]
    return run_apart(
        jobs, _on_one_core, workers=workers or os.cpu_count() or 1, seconds=min(seconds, 1e6), done=progress
    )


def _on_one_core(job: Job) -> str | None:
    """`make_ready` for one of as many processes as there are cores, in which nothing starts more of them."""
    import torch._inductor.config as inductor

    torch.set_num_threads(1)
    inductor.compile_threads = 1
    return make_ready(job)


def make_ready(job: Job) -> str | None:
    """One call of a peer in a cell; why it came to nothing, or None."""
    (peer,) = (peer for peer in PEERS if peer.name == job.peer)
    problem = job.plan.problem
    try:
        run = peer.prepare(job.plan.make(), problem)
        call_once(run, problem.inputs(0), backward=job.plan.backward)
    except NotOffered as reason:
        return str(reason)
    except (FlexcError, InternalError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
    if problem.device.type == "cuda":
        torch.cuda.synchronize()
    return None
