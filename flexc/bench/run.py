"""Runs a benchmark: for each cell, errors first, then the speed of every peer that was right."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from flexc.bench.cases import Case, Problem
from flexc.bench.facts import kernels_of
from flexc.bench.golden import Golden, make_golden, share
from flexc.bench.peers import PEERS, Inputs, NotOffered, Peer, Run, backward_of, call_once
from flexc.bench.results import Cell, Entry
from flexc.bench.timing import Timing, alternate
from flexc.errors import UnknownOption
from flexc.gpu_facts import matrix_rate

INPUT_SETS = 3

Calls = list[Callable[[], object]]


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
    seconds: float | None = None,
    absent: Mapping[str, str] = MappingProxyType({}),
) -> Cell:
    """Checks every peer against the fp64 golden, then times those that were right, in turns.

    FLOPs of the forward are 4 * B * H * S * S * D * share; the backward, which is timed alone, has 2.5 times
    as many.

    Args:
        case: what is computed.
        problem: its sizes.
        peers: who computes it.
        rounds: timed calls of each.
        backward: whether the backward alone is timed, or the forward.
        seconds: that all of it should take; rounds are left out for it, but not all.
        absent: why, by name, for peers that can't take part.
    """
    before = time.perf_counter()
    inputs = [problem.inputs(seed) for seed in range(INPUT_SETS)]
    golden = make_golden(case, problem, inputs[0], backward=backward)
    fraction = share(case, problem)
    entries: dict[str, Entry] = {}
    calls: dict[str, Calls] = {}
    for peer in peers:
        if peer.only_backward and not backward:
            continue
        if peer.name in absent:
            entries[peer.name] = Entry(peer.name, note=absent[peer.name])
            continue
        entries[peer.name], right = _checked(peer, case, problem, inputs, golden, backward=backward)
        if right:
            calls[peer.name] = right
    left = None if seconds is None else seconds - (time.perf_counter() - before)
    timings = alternate(calls, rounds=rounds, device=problem.device, seconds=left)
    flops = _flops(problem, fraction, backward=backward)
    entries |= {name: _timed(entries[name], timing, flops, problem) for name, timing in timings.items()}
    return Cell(
        case=case.name,
        batch=problem.batch,
        heads=problem.heads,
        length=problem.length,
        head_dim=problem.head_dim,
        dtype=str(problem.dtype).removeprefix("torch."),
        backward=backward,
        share=fraction,
        plain_error=golden.plain_error,
        entries=tuple(entries.values()),
    )


def _checked(
    peer: Peer,
    case: Case,
    problem: Problem,
    inputs: Sequence[Inputs],
    golden: Golden,
    *,
    backward: bool,
) -> tuple[Entry, Calls]:
    """What is known of a peer before it is timed, and its calls with each input: none if it is wrong."""
    entry, run, errors = _first_call(peer, case, problem, inputs[0], golden, backward=backward)
    if run is None:
        return entry, []
    if not golden.accepts(errors):
        plain = _listed(golden.plain_errors)
        return replace(entry, note=f"wrong: error {_listed(errors)}, plain PyTorch {plain}"), []
    calls: Calls = [backward_of(run, each) if backward else partial(run, *each) for each in inputs]
    return replace(entry, kernels=kernels_of(calls[0])), calls


def _timed(entry: Entry, timing: Timing, flops: float, problem: Problem) -> Entry:
    """The entry with its speed: `flops` operations in the time of a call."""
    peak, rate = _peak(problem), flops / timing.median_ms * 1e3
    of_peak = None if peak is None else rate / peak
    return replace(entry, timing=timing, tflops=rate / 1e12, of_peak=of_peak)


def _flops(problem: Problem, fraction: float, *, backward: bool) -> float:
    pairs = problem.batch * problem.heads * problem.length**2 * fraction
    return (10.0 if backward else 4.0) * problem.head_dim * pairs


def _peak(problem: Problem) -> float | None:
    """Operations a second of the GPU's matrix units in the problem's dtype; None where that is not known."""
    if problem.device.type != "cuda" or problem.dtype not in (torch.bfloat16, torch.float16):
        return None
    return matrix_rate(torch.cuda.current_device())


def _listed(errors: Sequence[float]) -> str:
    return ", ".join(f"{error:.1e}" for error in errors)


def _first_call(
    peer: Peer,
    case: Case,
    problem: Problem,
    inputs: Inputs,
    golden: Golden,
    *,
    backward: bool,
) -> tuple[Entry, Run | None, tuple[float, ...]]:
    before = time.perf_counter()
    try:
        run = peer.prepare(case, problem)
        results = call_once(run, inputs, backward=backward)
        if problem.device.type == "cuda":
            torch.cuda.synchronize()
    except NotOffered as reason:
        return Entry(peer.name, note=str(reason)), None, ()
    except Exception as error:  # whatever a peer's fault is, the others are timed
        text = str(error).splitlines() or [""]
        return Entry(peer.name, note=f"{type(error).__name__}: {text[0][:100]}"), None, ()
    seconds = time.perf_counter() - before
    errors = golden.errors(results)
    return Entry(peer.name, error=max(errors), first_call_s=seconds), run, errors
