"""The command line: each command's output and exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

import flexc
from flexc.bench.cases import CASES
from flexc.bench.peers import PEERS
from flexc.cli import main
from flexc.cli.cache import Action
from flexc.cli.inspect import Stage
from flexc.cli.options import Dtype

MODS = """
import torch
import flexc

SLOPES = torch.ones(8)

@flexc.mask_mod
def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)

@flexc.score_mod
def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)

def branches(b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return True
    return False
"""


LEARNED = """
import torch
import flexc

BOUND = torch.nn.Parameter(torch.ones(8))

@flexc.score_mod
def capped(score, b, h, q_idx, kv_idx):
    return BOUND[h] * torch.tanh(score / BOUND[h])
"""


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["flexc", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        code = exit_.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run_


@pytest.fixture
def mods(tmp_path: Path) -> Path:
    path = tmp_path / "mods.py"
    path.write_text(MODS)
    return path


COMMANDS = ("inspect", "explain", "precompile", "plot", "bench", "cache", "doctor")


def test_version(run: Run) -> None:
    result = run("--version")
    assert result == Result(0, f"flexc {flexc.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert "Usage:" in result.out


def test_help_of_bench_names_every_case_and_peer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run("bench", "--help").out
    assert "…" not in out
    for name in (*CASES, *(peer.name for peer in PEERS)):
        assert name in out


@pytest.mark.parametrize(
    "arguments", [("frobnicate",), ("inspect",), ("plot", "f.py:x", "--q-len", "-3"), ("cache", "burn")]
)
def test_usage_errors_exit_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).code == 2


def test_errors_of_the_user_exit_with_1(run: Run, mods: Path) -> None:
    result = run("inspect", f"{mods}:windo", "--stage", "trace")
    assert result.code == 1
    assert result.out == ""
    assert "did you mean window?" in result.err


def test_a_mistake_in_a_mod_shows_its_line(run: Run, mods: Path) -> None:
    result = run("explain", f"{mods}:branches")
    assert result.code == 1
    assert "mods.py:16" in result.err
    assert "^^^^" in result.err


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("trace", "# mask_mod"),
        ("ir", "# mask"),
        ("blocks", "one character"),
        ("plan", "target sm90"),
        ("source", "from triton"),
        ("ttgir", "ttg.num-warps"),
        ("ptx", ".target sm_90"),
    ],
)
def test_inspect(run: Run, mods: Path, stage: str, expected: str) -> None:
    result = run("inspect", f"{mods}:window", "--stage", stage, "--head-dim", 64)
    assert result.code == 0, result.err
    assert expected in result.out


def test_inspect_prints_what_runs(run: Run, mods: Path) -> None:
    result = run("inspect", f"{mods}:window+alibi", "--head-dim", 64, "--target", "sm80")
    assert result.code == 0, result.err
    compile(result.out, "generated.py", "exec")
    assert "SLOPES" in result.out


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_inspect_prints_the_backward_that_runs(run: Run, tmp_path: Path, target: str) -> None:
    path = tmp_path / "learned.py"
    path.write_text(LEARNED)
    result = run("inspect", f"{path}:capped", "--stage", "backward", "--head-dim", 64, "--target", target)
    assert result.code == 0, result.err
    compile(result.out, "generated.py", "exec")
    for function in ("attention_backward_rows", "score_mod_grad", "BOUND_grad"):
        assert f"def {function}(" in result.out


def test_inspect_unknown_target(run: Run, mods: Path) -> None:
    result = run("inspect", f"{mods}:window", "--target", "sm12")
    assert result.code == 1
    assert "sm90" in result.err


def test_explain(run: Run, mods: Path) -> None:
    result = run("explain", f"{mods}:window+alibi", "--q-len", 1000, "--kv-len", 1000)
    assert result.code == 0, result.err
    for expected in ("q_idx - kv_idx < 100", "tiles", "SLOPES[h]", "target sm90"):
        assert expected in result.out


def test_plot(run: Run, mods: Path, tmp_path: Path) -> None:
    for extra in ((), ("--blocks",)):
        result = run("plot", f"{mods}:window", "-o", tmp_path / "mask.png", *extra)
        assert result.code == 0, result.err
        assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert run("plot", f"{mods}:alibi").code == 1
    assert run("plot", f"{mods}:window", "-o", tmp_path / "mask.nonsense").code == 2


def test_precompile(run: Run, mods: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    result = run("precompile", mods, "--targets", "sm80,sm90", "--head-dims", 64, "-o", folder, "-j", 2)
    assert result.code == 0, result.err
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["flexc"] == flexc.__version__
    assert [(k["name"], k["target"]) for k in manifest["kernels"]] == [
        ("alibi", "sm80"),
        ("alibi", "sm90"),
        ("window", "sm80"),
        ("window", "sm90"),
    ]
    for entry in manifest["kernels"]:
        assert entry["error"] is None
        assert entry["resources"]
        assert all((folder / name).is_file() for name in entry["files"])
        assert flexc.load(folder / entry["folder"]).source


def test_precompile_reports_what_failed(run: Run, mods: Path, tmp_path: Path) -> None:
    result = run("precompile", f"{mods}:branches", "--targets", "sm80", "--head-dims", 64, "-o", tmp_path)
    assert result.code == 1
    assert "branches" in result.err
    (entry,) = json.loads((tmp_path / "manifest.json").read_text())["kernels"]
    assert "BranchOnTracedValue" in entry["error"]


def test_precompile_with_dropout(run: Run, mods: Path, tmp_path: Path) -> None:
    result = run(
        *("precompile", f"{mods}:window", "--targets", "sm80", "--head-dims", 32, "-o", tmp_path / "made"),
        *("--dropout", "-j", 1),
    )
    assert result.code == 0
    kernel = flexc.load(tmp_path / "made" / "window-sm80-d32-bf16-dropout")
    assert "seed_ptr" in kernel.source


def test_precompile_deterministic(run: Run, mods: Path, tmp_path: Path) -> None:
    asked = ("precompile", f"{mods}:window", "--targets", "sm90", "--head-dims", 64, "-o", tmp_path / "made")
    result = run(*asked, "--deterministic")
    assert result.code == 2
    assert "add --backward" in result.err
    result = run(*asked, "--deterministic", "--backward", "-j", 1)
    assert result.code == 0
    kernel = flexc.load(tmp_path / "made" / "window-sm90-d64-bf16-backward-deterministic")
    assert "turns" in kernel.backward_source, "tiles of dQ are added up in order"
    rows = [line.split("│")[1].strip() for line in result.out.splitlines() if line.startswith("│")]
    parts = ["rows", "", "finish", "kv", "q"]
    assert rows == ["window", *(f"backward_{part}".rstrip("_") for part in parts)]


def test_precompile_for_few_rows(run: Run, mods: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    result = run(
        *("precompile", f"{mods}:window", "--targets", "sm80,sm90", "--head-dims", 64, "-o", folder),
        *("--groups", "1,4", "-j", 2),
    )
    assert result.code == 0, result.err
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    made = {(k["target"], k["group"], k["q_len"]): flexc.load(folder / k["folder"]).artifact for k in kernels}
    tiles = {key: (artifact.block_q, artifact.packed_heads) for key, artifact in made.items()}
    few = {key: rows for key, rows in tiles.items() if key[2] is not None}
    assert few == {
        ("sm80", 1, 1): (16, 1), ("sm80", 1, 17): (64, 1), ("sm80", 4, 1): (4, 4), ("sm80", 4, 5): (16, 4),
        ("sm90", 1, 1): (16, 1), ("sm90", 1, 17): (64, 1), ("sm90", 4, 1): (4, 4), ("sm90", 4, 5): (16, 4),
        ("sm90", 4, 17): (32, 4),
    }  # fmt: skip
    assert len(tiles) == len(few) + 2


def test_precompile_into_a_file(run: Run, mods: Path) -> None:
    result = run("precompile", f"{mods}:window", "--targets", "sm80", "--head-dims", 64, "-o", mods)
    assert result.code == 2
    assert "File exists" in result.err


@pytest.mark.parametrize(
    "option", [("--head-dims", "64,x"), ("--dtypes", "int8"), ("--targets", ","), ("--groups", "0")]
)
def test_precompile_usage(run: Run, mods: Path, tmp_path: Path, option: tuple[str, str]) -> None:
    assert run("precompile", mods, "-o", tmp_path, *option).code == 2


def test_doctor(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0
    for expected in ("torch", "triton", "backends", "cpu", "cache"):
        assert expected in result.out
    found = json.loads(run("doctor", "--json").out)
    assert {"section": "backends", "name": "cpu", "state": "yes"}.items() <= {
        k: v for each in found if each["name"] == "cpu" for k, v in each.items()
    }.items()


def test_bench(run: Run, mods: Path, tmp_path: Path) -> None:
    sizes = ("--lengths", 128, "--head-dims", 32, "--hidden", 64, "--dtype", "fp32", "--rounds", 3)
    both = [("none", False), ("none", True), ("causal", False), ("causal", True)]
    result = run("bench", "--cases", "none,causal", *sizes, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert [(cell["case"], cell["backward"]) for cell in report["cells"]] == both
    for cell in report["cells"]:
        own = cell["entries"][0]
        assert own["peer"] == "flexc"
        assert own["error"] <= 2 * cell["plain_error"] + 1e-6
        assert own["timing"]["median_ms"] > 0
    table = run("bench", f"{mods}:window", *sizes)
    assert table.code == 0, table.err
    assert "window" in table.out
    assert "flash-attn: takes no functions [window]" in table.out
    forward = (*sizes, "--directions", "forward", "--budget", 60)
    saved = {"md": tmp_path / "table.md", "json": tmp_path / "table.json"}
    markdown = run("bench", f"{mods}:window", *forward, "--markdown", "--save", saved["md"])
    assert "| case | D | S | share | flexc |" in markdown.out
    assert "| window | 32 | 128 | 0.479 |" in markdown.out
    assert saved["md"].read_text().strip() == markdown.out.strip()
    assert f"flexc bench {mods}:window --lengths 128" in markdown.out
    assert "--save" not in markdown.out
    assert run("bench", f"{mods}:window", *forward, "--save", saved["json"]).code == 0
    assert len(json.loads(saved["json"].read_text())["cells"]) == 1
    assert run("bench", "--cases", "nonsense", *sizes).code == 1
    assert run("bench", "--directions", "sideways", *sizes).code == 2


def test_cache(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path))
    assert str(tmp_path) in run("cache", "path").out
    assert run("cache").code == 0
    assert run("cache", "clear").code == 0


@pytest.mark.parametrize("choice", [Action, Dtype, Stage])
def test_choices_are_strings(choice: type[Enum]) -> None:
    """Click before 8.2 compares a default with the choices as strings, and refuses any other."""
    assert all(isinstance(member, str) for member in choice)
