"""Every example runs, checks itself, and stays short enough to read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONG = ("demo.py", "train_bytes.py")
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in LONG)
LONGEST = 60


def test_the_listed_examples_exist() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "alibi",
        "causal",
        "inspect_kernel",
        "neighbourhood",
        "packed_documents",
        "paged_indices",
        "precompile",
        "prefix_lm",
        "sliding_window",
        "softcap",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert capsys.readouterr().out


def test_training_equals_the_dense_computation(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "train_bytes.py"
    spec = importlib.util.spec_from_file_location("example_train_bytes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = module.train(steps=5, check=True)  # fails where a loss differs
    assert losses[-1] < 0.9 * losses[0]
    assert len(losses) == 5
    assert "nats a byte" in capsys.readouterr().out


def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {
        f"{name}{ending}.png"
        for name in ("sliding_window", "packed_documents", "neighbourhood")
        for ending in ("", "-tiles")
    }
    manifest = json.loads((tmp_path / "kernels" / "manifest.json").read_text())
    assert len(manifest["kernels"]) == 9
    # Kernels made for Hopper may spill around their loops; see tests/compile/test_hopper.py.
    portable = [k for k in manifest["kernels"] if k["target"] != "sm90"]
    assert all(facts["spills"] == 0 for k in portable for facts in k["resources"].values())


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}
