"""The random bits of the Hopper kernels: no interpreter runs these, but their functions, as Triton's."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexc.codegen.design import Design
from flexc.philox import dropped_of, kept
from tests.codegen.generate import generate, generate_backward

_KERNEL = """

@triton.jit
def fill(out_ptr, seed_ptr, stream, q_start, kv_start, below, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    words = random_words(tl.load(seed_ptr), tl.cast(stream, tl.int32), q_start, rows, kv_start, columns)
    keep = words >= tl.minimum(tl.cast(below, tl.int64), 0xFFFFFFFF).to(tl.uint32)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + at, keep.to(tl.int8))
"""


# Of the backward, whose tiles have keys as rows: here a tile is KEYS x BLOCK_Q.
_TRANSPOSED = """

@triton.jit
def fill(out_ptr, seed_ptr, stream, q_start, kv_start, below):
    early, late = random_words(tl.load(seed_ptr), tl.cast(stream, tl.int32), q_start, kv_start, 0)
    words = of_pairs(early, late, 0)
    keep = words >= tl.minimum(tl.cast(below, tl.int64), 0xFFFFFFFF).to(tl.uint32)
    at = tl.arange(0, BLOCK_Q)[None, :] * KEYS + tl.arange(0, KEYS)[:, None]
    tl.store(out_ptr + at, keep.to(tl.int8))
"""


def _loaded(directory: Path, text: str) -> ModuleType:
    path: Path = directory / "hopper_kept.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n{text}")
    spec = importlib.util.spec_from_file_location("hopper_kept", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module", params=[64, 128])
def transposed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """`fill`, which writes what words of a generated Hopper backward say."""
    options = {"backward_block_q": request.param, "backward_num_stages": 3}
    source = "\n".join(generate_backward(hopper=True, dropout=True, head_dim=64, options=options))
    found = re.search(r"@gluon\.jit\ndef philox\(.*def of_pairs\(.*?\n\n\n", source, re.DOTALL)
    assert found is not None
    # Layouts are Gluon's alone, and 0, 1, 2, ... are in its shared memory; assembly is not interpreted.
    text = re.sub(r"@gluon\.jit\ndef surviving\(.*?\n\n\n", "", found[0], flags=re.DOTALL)
    text = re.sub(r"    layout: gl\.constexpr = .*?\n    \)\n", "", text, flags=re.DOTALL)
    text = re.sub(r"gl\.convert_layout\((.*), layout, assert_trivial=True\)", r"\1", text)
    text = re.sub(
        r"table\.slice\((0, [^,]*), 0\)\.load\(gl\.SliceLayout\(., layout\)\)", r"gl.arange(\1)", text
    )
    text = text.replace("gluon.jit", "triton.jit").replace("gl.", "tl.")
    constants = f"KEYS = tl.constexpr(64)\nBLOCK_Q = tl.constexpr({request.param})\n\n\n"
    return _loaded(tmp_path_factory.mktemp("dropout"), f"{constants}{text}{_TRANSPOSED}")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """`fill`, which writes what words of a generated Hopper file say."""
    source = generate(design=Design.HOPPER, dropout=True).source
    found = re.search(r"@gluon\.jit\ndef corners\(.*def random_words\(.*?\n\n\n", source, re.DOTALL)
    assert found is not None
    # Layouts are Gluon's alone.
    text = re.sub(r"@gluon\.jit\ndef surviving\(.*?\n\n\n", "", found[0], flags=re.DOTALL)
    text = re.sub(r"gl\.convert_layout\((.*), rows\.type\.layout, assert_trivial=True\)", r"\1", text)
    text = text.replace("gluon.jit", "triton.jit").replace("gl.", "tl.")
    return _loaded(tmp_path_factory.mktemp("dropout"), f"{text}{_KERNEL}")


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**63 - 1, -1, -(2**40)])
@pytest.mark.parametrize("probability", [0.0, 0.25, 0.9])
def test_hopper_keeps_the_same_pairs(module: ModuleType, seed: int, probability: float) -> None:
    for stream, q_start, kv_start in ((0, 0, 0), (37, 1008, 2**24 + 64)):
        out = torch.empty(32, 64, dtype=torch.int8)
        below = dropped_of(probability) << 16
        module.fill[(1,)](out, torch.tensor(seed), stream, q_start, kv_start, below, ROWS=32, COLUMNS=64)
        rows, columns = torch.arange(32) + q_start, torch.arange(64) + kv_start
        expected = kept(seed % 2**64, probability, torch.tensor(stream), rows[:, None], columns[None, :])
        assert torch.equal(out.bool(), expected)


@pytest.mark.parametrize("seed", [0, 2**31 + 5, -1, -(2**40)])
@pytest.mark.parametrize("probability", [0.0, 0.25, 0.9])
def test_the_hopper_backward_keeps_the_same_pairs(
    transposed: ModuleType, seed: int, probability: float
) -> None:
    block_q = transposed.BLOCK_Q.value
    for stream, q_start, kv_start in ((0, 0, 0), (37, 1024, 2**24 + 64)):
        out = torch.empty(block_q, 64, dtype=torch.int8)
        below = dropped_of(probability) << 16
        transposed.fill[(1,)](out, torch.tensor(seed), stream, q_start, kv_start, below)
        rows, columns = torch.arange(block_q) + q_start, torch.arange(64) + kv_start
        expected = kept(seed % 2**64, probability, torch.tensor(stream), rows[:, None], columns[None, :])
        assert torch.equal(out.bool(), expected)
