"""The benchmark's own arithmetic: shares, goldens, and that a wrong result gets no speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from flexc.api import attention
from flexc.bench import golden as golden_module
from flexc.bench.apart import run_apart
from flexc.bench.cases import CASES, Case, Problem, make_case
from flexc.bench.cells import Plan, plans, problems
from flexc.bench.facts import KernelFacts
from flexc.bench.golden import make_golden, share
from flexc.bench.peers import NotOffered, Peer, Run, call_once
from flexc.bench.ready import Job, make_ready
from flexc.bench.report import markdown, mod_costs, notes, rows
from flexc.bench.results import Cell, Entry, to_json
from flexc.bench.run import choose_peers, run_cell
from flexc.bench.sizes import usual_sizes
from flexc.bench.timing import Timing, alternate
from flexc.errors import UnknownOption
from flexc.sass import Instructions
from tests.apart_work import work

CPU = torch.device("cpu")
PROBLEM = Problem(batch=2, heads=2, length=200, head_dim=16, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", CASES)
def test_cases_are_right(name: str) -> None:
    case = make_case(name, PROBLEM)
    inputs = PROBLEM.inputs(0)
    golden = make_golden(case, PROBLEM, inputs)
    out = attention(*inputs, mask_mod=case.mask, score_mod=case.score, backend="reference")
    assert isinstance(out, torch.Tensor)
    assert golden.accepts(golden.errors([out]))
    assert not golden.accepts(golden.errors([out + 1e-2]))
    assert not golden.accepts(golden.errors([out * float("nan")]))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_cases_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_module, "_BAND", 200 * 64)  # four bands of rows
    case = make_case(name, PROBLEM)
    inputs = PROBLEM.inputs(0)
    golden = make_golden(case, PROBLEM, inputs, backward=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        precise = (x.double() for x in (q, k, v))  # as exact on every CPU
        out: torch.Tensor = attention(*precise, mask_mod=case.mask, score_mod=case.score, backend="reference")
        return out.to(q.dtype)

    found = list(call_once(run, inputs, backward=True))
    assert golden.accepts(golden.errors(found))
    for n in range(3):
        assert not golden.accepts(golden.errors([x + 1e-2 * (i == n) for i, x in enumerate(found)]))


def test_the_nearest_gradients_of_a_dtype_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_key_for_many(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx == q_idx // 64

    monkeypatch.setattr(golden_module, "_BAND", 128)  # bands of one row, whose gradients of v are exact
    problem = Problem(batch=1, heads=1, length=128, head_dim=16, dtype=torch.bfloat16, device=CPU)
    case = Case("one key for many", mask=one_key_for_many)
    golden = make_golden(case, problem, problem.inputs(0), backward=True)
    nearest = [x.bfloat16().double() for x in golden.exact]
    errors = [float((x - exact).abs().max()) for x, exact in zip(nearest, golden.exact, strict=True)]
    assert golden.accepts(errors)


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
    case = make_case("alibi", PROBLEM)
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


def test_cells_of_every_case_size_and_direction() -> None:
    found = plans(["causal", "small-window"], [PROBLEM], own=False, directions=[False, True])
    assert [(p.case, p.backward, p.problem.length) for p in found] == [
        ("causal", False, 200), ("causal", True, 200),
        ("small-window", False, 8192), ("small-window", True, 8192),
    ]  # fmt: skip
    assert found[2].problem.dtype is PROBLEM.dtype
    assert found[2].problem.heads == 128


def test_a_budget_leaves_out_rounds_but_not_all() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    alternate({"a": [call]}, rounds=50, device=CPU, seconds=0.0)
    assert count == 1 + 3


def test_who_is_absent_has_a_reason_and_no_speed() -> None:
    peers = choose_peers(["flexc", "flexc-deterministic", "torch-flex"])
    case = make_case("none", PROBLEM)
    cell = run_cell(case, PROBLEM, peers=peers, rounds=3, absent={"torch-flex": "not reached"})
    assert [entry.peer for entry in cell.entries] == ["flexc", "torch-flex"]
    assert notes([cell]) == ["torch-flex: not reached [none]"]


def test_work_apart_survives_what_goes_wrong() -> None:
    done: list[str] = []
    jobs = ["raises", "refuses", "ends", "fine"]
    failed = run_apart(jobs, work, workers=1, seconds=600, done=done.append)
    assert failed == {
        "raises": "ValueError: a fault",
        "refuses": "no such thing",
        "ends": "its process ended with exit code 3",
    }
    assert done == jobs


def test_work_apart_ends_in_the_time_allowed() -> None:
    failed = run_apart(["hangs", "fine"], work, workers=1, seconds=0.5)
    assert failed == {"hangs": "not done in the time allowed", "fine": "not reached in the time allowed"}


def test_a_cell_is_made_ready_by_name() -> None:
    assert make_ready(Job(Plan("alibi", PROBLEM, backward=True), "flexc")) is None
    why = make_ready(Job(Plan("alibi", PROBLEM), "torch-flex"))
    assert why == "compiled for GPUs only in this benchmark"


def _cell(
    backward: bool, peers: Mapping[str, float], kernels: tuple[KernelFacts, ...], case: str = "causal"
) -> Cell:
    entries = tuple(
        Entry(name, 0.0, Timing(ms, ms, ms, 21.4), 1000 / ms, 0.5, kernels if name == "flexc" else ())
        for name, ms in peers.items()
    )
    return Cell(case, 1, 2, 4096, 64, "bfloat16", backward, 0.5, 0.1, entries)


def test_a_report_shows_what_kernels_are_made_of_beside_the_times() -> None:
    code = Instructions({"HGMMA": 64}, {"UTMALDG": 3, "UTMASTG": 1}, 8, 12, 4, (240, 24))
    plain = Instructions({}, {}, 0, 0, 0, ())
    kernels = (
        KernelFacts("a", 128, 128, 12, 168, 8, 200 * 1024, code),
        KernelFacts("b", 128, 128, 4, 36, 0, 1024, plain),
        KernelFacts("c", 128, 128, 4, 40, 16, 0, None),
    )
    cells = [
        _cell(True, {"flexc": 2.0, "flexc-deterministic": 2.5, "torch-flex": 3.0}, kernels),
        _cell(True, {"flexc": 2.0}, ()),
    ]
    found = [dict(zip(rows(cells)[0], row, strict=True)) for row in rows(cells)[1:]]
    assert found[0] == {
        "case": "causal", "D": "64", "S": "4,096", "share": "0.500", "flexc": "500",
        "flexc-deterministic": "400", "of peak": "50 %", "ms": "2", "torch-flex": "333", "ratio": "1.50",
        "host µs": "21", "registers": "168 + 36 + 40", "spills B": "8/12 + 0 + 16",
        "instructions": "64 HGMMA 4 UTMA + - + ?", "shared KiB": "200 + 1 + 0",
    }  # fmt: skip
    assert found[1]["torch-flex"] == found[1]["registers"] == ""
    assert rows(cells[1:])[0] == ["case", "D", "S", "share", "flexc", "of peak", "ms", "host µs"]
    text = markdown(cells, {"device": "a GPU"}, "flexc bench", "2026-11-30")
    assert "Written on 2026-11-30 by\n\n```\nflexc bench\n```\n\non device a GPU." in text
    assert "### Backward\n\n| case |" in text
    assert "### Forward" not in text
    assert "lie 0.0 % of the median apart" in text
    assert to_json(cells, {})["cells"][0]["entries"][0]["kernels"][0]["instructions"]["stored"] == 8


def test_what_mods_cost() -> None:
    cells = [
        _cell(False, {"flexc": ms}, (), case) for case, ms in (("none", 1), ("causal", 2), ("alibi", 2.5))
    ]
    cells.append(_cell(True, {"flexc": 2}, (), "alibi"))
    assert mod_costs(cells) == [["", "D", "S", "alibi"], ["forward", "64", "4,096", "80 %"]]


def test_a_cpu_has_small_sizes_and_no_column_of_a_gpu() -> None:
    sizes = usual_sizes(on_gpu=False)
    grid = list(problems(lengths=(128,), head_dims=(16,), tokens=128, hidden=16, dtype=torch.float32))
    (plan,) = plans(sizes.cases[:1], grid, own=False, directions=[False])
    cell = run_cell(plan.make(), plan.problem, peers=choose_peers(["flexc"]), rounds=sizes.rounds)
    assert rows([cell])[0] == ["case", "D", "S", "share", "flexc", "ms"]
    assert max(sizes.lengths) * max(sizes.head_dims) * sizes.hidden < 2**24
    assert usual_sizes(on_gpu=True).cases == tuple(CASES)


def test_unknown_names() -> None:
    with pytest.raises(UnknownOption, match="no peer 'x'"):
        choose_peers(["x"])
    with pytest.raises(UnknownOption, match="no case 'x'"):
        make_case("x", PROBLEM)
