"""The benchmark's own arithmetic: shares, goldens, and that a wrong result gets no speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexc.api import attention
from flexc.bench.cases import CASES, Case, Problem, make_case
from flexc.bench.golden import make_golden, share
from flexc.bench.peers import NotOffered, Peer, Run
from flexc.bench.run import choose_peers, problems, run_cell, to_json
from flexc.bench.timing import alternate
from flexc.errors import UnknownOption

CPU = torch.device("cpu")
PROBLEM = Problem(batch=2, heads=2, length=200, head_dim=16, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", CASES)
def test_cases_are_right(name: str) -> None:
    case = make_case(name, PROBLEM)
    inputs = PROBLEM.inputs(0)
    golden = make_golden(case, PROBLEM, inputs)
    out = attention(*inputs, mask_mod=case.mask, score_mod=case.score, backend="reference")
    assert isinstance(out, torch.Tensor)
    assert golden.accepts(golden.error(out))
    assert not golden.accepts(golden.error(out + 1e-2))
    assert not golden.accepts(golden.error(out * float("nan")))


@pytest.mark.parametrize(("name", "expected"), [("none", 1.0), ("causal", 201 / 400)])
def test_share(name: str, expected: float) -> None:
    assert share(make_case(name, PROBLEM), PROBLEM) == pytest.approx(expected)


def test_share_of_a_mask_that_reads_the_batch() -> None:
    def first_only(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (b == 0) & (kv_idx < 50)

    assert share(Case("mine", mask=first_only), PROBLEM) == pytest.approx(0.125)


def _wrong(case: Case, problem: Problem) -> Run:
    return lambda q, k, v: v


def _absent(case: Case, problem: Problem) -> Run:
    raise NotOffered("is not installed")


def _breaks(case: Case, problem: Problem) -> Run:
    raise RuntimeError("no kernel\nfor you")


def test_only_right_results_have_a_speed() -> None:
    others = (Peer("wrong", _wrong), Peer("absent", _absent), Peer("breaks", _breaks))
    (flexc_peer,) = choose_peers(["flexc"])
    cell = run_cell(make_case("causal", PROBLEM), PROBLEM, peers=(flexc_peer, *others), rounds=3)
    own = cell.entry("flexc")
    assert own is not None
    assert own.timing is not None
    assert own.tflops == pytest.approx(4 * 2 * 2 * 200**2 * 16 * cell.share / own.timing.median_ms / 1e9)
    notes = {entry.peer: entry.note for entry in cell.entries if entry.timing is None}
    assert notes["absent"] == "is not installed"
    assert notes["breaks"] == "RuntimeError: no kernel"
    assert (notes["wrong"] or "").startswith("wrong: error")
    assert cell.ratio("wrong") is None
    assert to_json([cell], {})["cells"][0]["case"] == "causal"


def test_the_backward_alone_is_checked_and_timed() -> None:
    peers = (*choose_peers(["flexc"]), Peer("wrong", lambda case, problem: lambda q, k, v: q * k.sum()))
    case = make_case("alibi", PROBLEM) if "alibi" in CASES else make_case("causal", PROBLEM)
    cell = run_cell(case, PROBLEM, peers=peers, rounds=3, backward=True)
    own, wrong = cell.entry("flexc"), cell.entry("wrong")
    assert own is not None
    assert own.timing is not None
    assert own.tflops == pytest.approx(10 * 2 * 2 * 200**2 * 16 * cell.share / own.timing.median_ms / 1e9)
    assert wrong is not None
    assert wrong.timing is None


def test_timing_takes_turns() -> None:
    order: list[str] = []
    calls = {name: [lambda n=name: order.append(n)] for name in ("a", "b")}
    found = alternate(calls, rounds=4, device=CPU)
    assert order == ["a", "b"] * 5
    assert found["a"].low_ms <= found["a"].median_ms <= found["a"].high_ms


def test_problems() -> None:
    found = list(problems(lengths=[128, 512], head_dims=[64], tokens=512, hidden=256, dtype=torch.float32))
    assert [(p.batch, p.heads, p.length) for p in found] == [(4, 4, 128), (1, 4, 512)]


def test_unknown_names() -> None:
    with pytest.raises(UnknownOption, match="no peer 'x'"):
        choose_peers(["x"])
    with pytest.raises(UnknownOption, match="no case 'x'"):
        make_case("x", PROBLEM)
