"""The random bits of the Hopper kernels: no interpreter runs these, but their functions, as Triton's."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexc.codegen.design import Design
from flexc.philox import kept
from tests.codegen.generate import generate

_KERNEL = """

@triton.jit
def fill(out_ptr, seed_ptr, stream, q_start, kv_start, below, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = q_start + tl.arange(0, ROWS)[:, None]
    columns = kv_start + tl.arange(0, COLUMNS)[None, :]
    keep = kept(tl.load(seed_ptr), tl.cast(stream, tl.int32), rows, columns, below)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + at, keep.to(tl.int8))
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """`fill`, which writes what `kept` of a generated Hopper file says."""
    source = generate(design=Design.HOPPER, dropout=True).source
    found = re.search(r"@gluon\.jit\ndef corners\(.*def kept\(.*?\n\n\n", source, re.DOTALL)
    assert found is not None
    # Layouts are Gluon's alone.
    text = re.sub(r"gl\.convert_layout\((.*), q_idx\.type\.layout, assert_trivial=True\)", r"\1", found[0])
    text = text.replace("gluon.jit", "triton.jit").replace("gl.", "tl.")
    path: Path = tmp_path_factory.mktemp("dropout") / "hopper_kept.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n{text}{_KERNEL}")
    spec = importlib.util.spec_from_file_location("hopper_kept", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**63 - 1, -1, -(2**40)])
@pytest.mark.parametrize("probability", [0.0, 0.25, 0.9])
def test_hopper_keeps_the_same_pairs(module: ModuleType, seed: int, probability: float) -> None:
    for stream, q_start, kv_start in ((0, 0, 0), (37, 1008, 2**24 + 64)):
        out = torch.empty(32, 64, dtype=torch.int8)
        below = int(probability * 2**32)
        module.fill[(1,)](out, torch.tensor(seed), stream, q_start, kv_start, below, ROWS=32, COLUMNS=64)
        rows, columns = torch.arange(32) + q_start, torch.arange(64) + kv_start
        expected = kept(seed % 2**64, probability, torch.tensor(stream), rows[:, None], columns[None, :])
        assert torch.equal(out.bool(), expected)
