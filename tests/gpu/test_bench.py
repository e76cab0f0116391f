"""The benchmark on a GPU: what it compiles ahead, and what it says of kernels. No times are judged."""

from __future__ import annotations

import pytest
import torch

from flexc.bench.cases import Problem
from flexc.bench.cells import Plan
from flexc.bench.environment import environment
from flexc.bench.ready import get_ready
from flexc.bench.results import Cell
from flexc.bench.run import choose_peers, run_cell

PROBLEM = Problem(1, 2, 512, 64, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("backward", [False, True])
def test_cells(backward: bool) -> None:
    plans = [Plan("alibi", PROBLEM, backward=backward), Plan("small-window", PROBLEM, backward=backward)]
    peers = choose_peers(["flexc", "flexc-deterministic", "sdpa-cudnn"])
    assert get_ready(plans, peers, workers=2, seconds=300) == {}
    for plan in plans:
        cell = run_cell(plan.make(), PROBLEM, peers=peers, rounds=3, backward=backward)
        _check(cell)
        assert (cell.entry("flexc-deterministic") is not None) is backward


def _check(cell: Cell) -> None:
    own = cell.entry("flexc")
    assert own is not None
    assert own.timing is not None, own.note
    assert own.of_peak is not None
    assert 0 < own.of_peak < 1
    assert own.kernels
    assert any(kernel.instructions and kernel.instructions.matrix for kernel in own.kernels)


def test_environment() -> None:
    found = environment()
    assert "TFLOP/s at" in found["matrix rate"]
    assert found["driver"] != "unknown"
