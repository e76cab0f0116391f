"""The model of shared memory against what the compiler takes, for kernels of many kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.codegen.target import TARGETS
from flexc.codegen.tiles import misfit, shared_memory
from flexc.compiler import compile_file
from flexc.ir.types import Storage
from tests.codegen.generate import generate, spec_for

BIAS = scores.relative_bias(torch.ones(8, 255))
DOCUMENTS = masks.document(torch.zeros(64, dtype=torch.int32))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sm80-64": ("sm80", {"mask": masks.causal, "head_dim": 64}),
    "sm80-128-bias": ("sm80", {"score": BIAS}),
    "sm80-256": ("sm80", {"mask": masks.causal, "head_dim": 256}),
    "sm89-128-documents": ("sm89", {"mask": DOCUMENTS}),
    "sm89-64-fp32": ("sm89", {"mask": masks.causal, "head_dim": 64, "storage": Storage.FP32}),
    "sm90-128": ("sm90", {"mask": masks.causal}),
    "sm90-64-bias": ("sm90", {"score": BIAS, "mask": DOCUMENTS, "head_dim": 64}),
    "sm90-192-128": ("sm90", {"mask": masks.causal, "head_dim": 192, "head_dim_v": 128}),
    "sm90-64-fp32": ("sm90", {"head_dim": 64, "storage": Storage.FP32}),
    "sm100-128": ("sm100", {"mask": masks.causal, "has_sinks": True, "return_lse": True}),
    "sm100-64": ("sm100", {"mask": masks.sliding_window(9), "head_dim": 64}),
    "sm120-128": ("sm120", {"mask": masks.causal, "score": scores.alibi(torch.ones(8))}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_model_is_no_less_than_what_the_compiler_takes(name: str, tmp_path: Path) -> None:
    target, facts = CASES[name]
    kernel = generate(**facts, target=target)
    path = tmp_path / "kernel.py"
    path.write_text(kernel.source)
    taken = compile_file(path, kernel).shared
    plan = kernel.plan
    model = shared_memory(spec_for(**facts), TARGETS[target], plan.precision, plan.tiles)
    assert taken <= model <= TARGETS[target].shared_memory
    assert misfit(spec_for(**facts), TARGETS[target], plan.precision, plan.tiles) is None
