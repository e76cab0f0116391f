"""Runs a benchmark: for each cell, errors first, then the speed of every peer that was right."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flexc._version import __version__
from flexc.bench.cases import Case, Problem
from flexc.bench.golden import make_golden, share
from flexc.bench.peers import PEERS, NotOffered, Peer, Run
from flexc.bench.timing import Timing, alternate
from flexc.errors import FlexcError, UnknownOption

INPUT_SETS = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer in one cell. `timing` is None, and `note` says why, when it has no speed."""

    peer: str
    error: float | None = None
    timing: Timing | None = None
    tflops: float | None = None
    first_call_s: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One case at one size. `share` is the fraction of pairs that may attend; only their FLOPs count."""

    case: str
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    share: float
    plain_error: float
    entries: tuple[Entry, ...]

    def entry(self, peer: str) -> Entry | None:
        """What a peer did in this cell; None when it was not asked."""
        return next((entry for entry in self.entries if entry.peer == peer), None)

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as `peer` flexc is; None when either has no speed."""
        own, other = self.entry("flexc"), self.entry(peer)
        if own is None or other is None or own.timing is None or other.timing is None:
            return None
        return other.timing.median_ms / own.timing.median_ms


def choose_peers(names: Sequence[str]) -> tuple[Peer, ...]:
    """The named peers, all of them for no names; raises UnknownOption for a name that does not exist."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise UnknownOption(f"there is no peer {name!r}", hint=f"one of {', '.join(known)}")
    return tuple(known[name] for name in names) if names else PEERS


def run_cell(
    case: Case,
    problem: Problem,
    *,
    peers: Sequence[Peer] = PEERS,
    rounds: int = 30,
    backward: bool = False,
) -> Cell:
    """Checks every peer against the fp64 golden, then times those that were right, in turns.

    FLOPs of the forward are 4 * B * H * S * S * D * share; the backward, which is timed alone, has 2.5 times
    as many.
    """
    inputs = [problem.inputs(seed) for seed in range(INPUT_SETS)]
    golden = make_golden(case, problem, inputs[0], backward=backward)
    fraction = share(case, problem)
    entries: dict[str, Entry] = {}
    calls: dict[str, list[Callable[[], object]]] = {}
    for peer in peers:
        entry, run = _first_call(peer, case, problem, inputs[0], golden.error, backward=backward)
        entries[peer.name] = entry
        if run is None or entry.error is None:
            continue
        if not golden.accepts(entry.error):
            note = f"wrong: error {entry.error:.1e}, plain PyTorch {golden.plain_error:.1e}"
            entries[peer.name] = dataclasses.replace(entry, note=note)
            continue
        calls[peer.name] = [_backward_of(run, each) if backward else partial(run, *each) for each in inputs]
    flops = (
        (10.0 if backward else 4.0)
        * problem.batch
        * problem.heads
        * problem.length**2
        * problem.head_dim
        * fraction
    )
    for name, timing in alternate(calls, rounds=rounds, device=problem.device).items():
        tflops = flops / timing.median_ms / 1e9
        entries[name] = dataclasses.replace(entries[name], timing=timing, tflops=tflops)
    return Cell(
        case=case.name,
        batch=problem.batch,
        heads=problem.heads,
        length=problem.length,
        head_dim=problem.head_dim,
        dtype=str(problem.dtype).removeprefix("torch."),
        share=fraction,
        plain_error=golden.plain_error,
        entries=tuple(entries.values()),
    )


def _first_call(
    peer: Peer,
    case: Case,
    problem: Problem,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    measure: Callable[[torch.Tensor], float],
    *,
    backward: bool,
) -> tuple[Entry, Run | None]:
    before = time.perf_counter()
    try:
        run = peer.prepare(case, problem)
        out = _backward_of(run, inputs)()[0] if backward else run(*inputs)
        if problem.device.type == "cuda":
            torch.cuda.synchronize()
    except NotOffered as reason:
        return Entry(peer.name, note=str(reason)), None
    except (FlexcError, RuntimeError) as error:
        text = str(error).splitlines() or [""]
        return Entry(peer.name, note=f"{type(error).__name__}: {text[0][:100]}"), None
    seconds = time.perf_counter() - before
    return Entry(peer.name, error=measure(out), first_call_s=seconds), run


def _backward_of(
    run: Run, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Runs the forward now; the backward at each call, with q as the gradient that comes in."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = run(leaves[0], leaves[1], leaves[2])
    return partial(torch.autograd.grad, out, leaves, inputs[0], retain_graph=True)


def problems(
    *, lengths: Sequence[int], head_dims: Sequence[int], tokens: int, hidden: int, dtype: torch.dtype
) -> Iterator[Problem]:
    """Every head dimension and length, with `tokens` tokens in all and heads that make up `hidden`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for head_dim in head_dims:
        for length in lengths:
            yield Problem(
                batch=max(1, tokens // length),
                heads=max(1, hidden // head_dim),
                length=length,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
            )


def environment() -> dict[str, str]:
    """What the numbers depend on: the device, its driver, and versions."""
    facts = {"flexc": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-attn", "flash-attn-4"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return {"device": platform.processor() or platform.machine(), **facts}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "device": f"{gpu.name}, {gpu.multi_processor_count} SMs",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        **facts,
    }


def to_json(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    """A report as plain data: `{"environment", "settings", "cells"}`."""
    return {
        "environment": environment(),
        "settings": settings,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
