"""Generated files: the same text each time, in the house style, and importable alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.codegen.design import Design
from flexc.codegen.module import GeneratedKernel
from flexc.compiler import import_file
from flexc.ir.spec import Blocks
from flexc.ir.types import Storage
from tests.codegen.generate import Mod, generate, generate_backward, names_in
from tests.mods import corpus


def _files(folder: Path) -> Iterator[Path]:
    """Two files of every mod of the corpus, one made for Hopper, and some with other features."""
    targets = ("sm80", "sm90", "sm100")
    dims = (64, 128, 96, 256)
    for n, (name, entry) in enumerate(corpus().items()):
        case = entry.make()
        yield _write(
            folder / f"{name}.py",
            generate(case.mask, case.score, targets[n % 3], head_dim=64, return_lse=n % 2 == 0),
        )
        facts: dict[str, Any] = {"head_dim": dims[n % 4], "return_lse": n % 2 == 0, "has_sinks": n % 3 == 0}
        hopper = generate(case.mask, case.score, design=Design.HOPPER, **facts)
        yield _write(folder / f"{name}_hopper.py", hopper)
    bias = scores.relative_bias(torch.randn(4, 33))
    yield _write(folder / "plain.py", generate(has_sinks=True, return_lse=True, head_dim=80))
    yield _write(folder / "single.py", generate(masks.causal, bias, storage=Storage.FP32, head_dim_v=72))
    for n, text in enumerate(
        [
            *generate_backward(masks.causal, bias, deterministic=True, head_dim_v=72, has_sinks=True),
            *generate_backward(None, scores.softcap(30.0), dropout=True, head_dim=80),
            *generate_backward(masks.causal, bias, target="sm86", has_sinks=True, head_dim=72),
            *generate_backward(masks.sliding_window(64), scores.alibi(torch.ones(8)), storage=Storage.FP32),
        ]
    ):
        path = folder / f"backward_{n}.py"
        path.write_text(text)
        yield path
    yield _write(folder / "many.py", generate(_many_captures(), head_dim=31))


def _write(path: Path, kernel: GeneratedKernel) -> Path:
    path.write_text(kernel.source)
    return path


def _many_captures():
    """A mask whose function in the generated file takes more arguments than fit on a line."""
    tables = [torch.zeros(5, 7, dtype=torch.int32) for _ in range(9)]

    def mask(b, h, q_idx, kv_idx):
        seen = q_idx >= kv_idx
        for table in tables:
            seen = seen & (table[q_idx, kv_idx] < 3)
        return seen

    return mask


def test_generated_files_are_in_the_house_style(tmp_path: Path) -> None:
    files = list(_files(tmp_path))
    assert len(files) > 60
    for command in (("check",), ("format", "--check", "--diff", "--line-length", "110")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("target", ["sm80", "sm100"])
def test_the_same_spec_gives_the_same_text(target: str) -> None:
    def once() -> str:
        documents = masks.document(torch.arange(12, dtype=torch.int32) // 5)
        return generate(masks.causal & documents, scores.alibi(torch.ones(4)), target).source

    assert once() == once()


def test_the_text_does_not_depend_on_hash_seeds() -> None:
    program = (
        "import hashlib\n"
        "from tests.mods import corpus\n"
        "from tests.codegen.generate import generate\n"
        "sources = []\n"
        "for entry in [e for e in corpus().values() if e.origin == 'flexc']:\n"
        "    case = entry.make()\n"
        "    sources.append(generate(case.mask, case.score).source)\n"
        "print(hashlib.sha256('\\0'.join(sources).encode()).hexdigest())\n"
    )
    digests = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "PATH": "/usr/bin:/bin"},
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


def test_a_generated_file_imports_alone(tmp_path: Path) -> None:
    kernel = generate(masks.causal, scores.softcap(3.0))
    path = _write(tmp_path / "kernel.py", kernel)
    program = f"import sys, runpy; print(sorted(runpy.run_path({str(path)!r})), 'flexc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "'attention_forward'" in done.stdout
    assert done.stdout.rstrip().endswith("False")


def test_importing_leaves_nothing_behind(tmp_path: Path) -> None:
    path = _write(tmp_path / "kernel.py", generate())
    before = set(sys.modules)
    module = import_file(path)
    assert hasattr(module, "attention_forward")
    assert module.__name__ not in set(sys.modules) - before
    assert importlib.util.find_spec("flexc") is not None


def test_the_header_quotes_the_mods_and_the_launch() -> None:
    kernel = generate(masks.sliding_window(7), scores.softcap(3.0), "sm100", {"num_warps": 4})
    header = kernel.source.partition('"""\n\n')[0]
    assert "Attention forward for sm100: score_mod and mask_mod, D=128, bf16." in header
    assert "num_warps=4" in header
    assert "return c * torch.tanh(score / c)" in header
    assert "masks.py:" in header


def test_quotes_and_backslashes_in_a_mod_do_not_end_the_header() -> None:
    def mask(b, h, q_idx, kv_idx):
        r"""A docstring with a backslash \ and quotes."""
        note = '''\t"""'''
        return q_idx >= kv_idx + len(note) * 0

    assert "A docstring with a backslash" in generate(mask).source


@pytest.mark.parametrize("score", [None, scores.softcap(20.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lists_of_blocks_need_no_mask(head_dim: int, score: Mod | None) -> None:
    """Lists may say which pairs attend all by themselves: no kernel has a mask to apply then."""
    facts: dict[str, Any] = {"blocks": Blocks.MAP, "head_dim": head_dim}
    for design in Design:
        assert "mask_mod" not in names_in(generate(None, score, design=design, **facts).source)
    for deterministic in (False, True):
        parts = generate_backward(None, score, hopper=True, deterministic=deterministic, **facts)
        assert not any("mask_mod" in names_in(part) for part in parts)
