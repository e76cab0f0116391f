"""The generated source of a dozen calls, as golden files: a change of the generator shows in review."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.codegen.design import Design
from flexc.ir.types import Storage
from tests.codegen.generate import generate, generate_backward, independent_of_the_machine
from tests.conftest import Golden

DOCUMENTS = torch.zeros(64, dtype=torch.int32)
SLOPES = torch.ones(8)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal},
    "causal_sm80": {"mask": masks.causal, "target": "sm80"},
    "causal_sm100": {"mask": masks.causal, "target": "sm100"},
    "sliding_window": {"mask": masks.sliding_window(128)},
    "alibi_causal": {"mask": masks.causal, "score": scores.alibi(SLOPES)},
    "softcap": {"score": scores.softcap(30.0)},
    "documents": {"mask": masks.document(DOCUMENTS)},
    "relative_bias": {"score": scores.relative_bias(torch.ones(8, 255))},
    "natten2d": {"mask": masks.natten2d(32, 48, 7)},
    "prefix_lm": {"mask": masks.prefix_lm(torch.ones(2, dtype=torch.int32))},
    "padded_sinks_lse": {"mask": masks.causal, "head_dim": 80, "has_sinks": True, "return_lse": True},
    "few_rows": {
        "mask": masks.causal,
        "score": scores.alibi(SLOPES),
        "few_rows": 2,
        "packed_heads": 8,
        "has_sinks": True,
        "return_lse": True,
    },
    "hopper_plain": {"design": Design.HOPPER, "head_dim": 64},
    "hopper_plain_of_wide_heads": {"design": Design.HOPPER, "head_dim": 128},
    "hopper_alibi_causal": {"design": Design.HOPPER, "mask": masks.causal, "score": scores.alibi(SLOPES)},
    "hopper_softcap_causal": {
        "design": Design.HOPPER,
        "mask": masks.causal,
        "score": scores.softcap(30.0),
        "head_dim": 64,
        "bounded": True,
        "return_lse": True,
    },
    "hopper_bias_causal": {
        "design": Design.HOPPER,
        "mask": masks.causal,
        "score": scores.relative_bias(torch.ones(8, 255)),
        "head_dim": 64,
    },
    "hopper_wide_sinks_lse": {
        "design": Design.HOPPER,
        "head_dim": 256,
        "has_sinks": True,
        "return_lse": True,
    },
    "hopper_two_parts": {"design": Design.HOPPER, "mask": masks.causal, "head_dim": 192, "head_dim_v": 96},
    "hopper_walk": {
        "design": Design.HOPPER,
        "mask": masks.sliding_window(128),
        "head_dim": 64,
        "walk": 3,
        "has_sinks": True,
        "return_lse": True,
    },
    "hopper_dropout": {"design": Design.HOPPER, "mask": masks.causal, "dropout": True},
    "hopper_few_rows": {
        "design": Design.HOPPER,
        "mask": masks.causal,
        "score": scores.alibi(SLOPES),
        "few_rows": 16,
        "packed_heads": 8,
        "has_sinks": True,
        "return_lse": True,
    },
    "single_precision": {"mask": masks.causal, "score": scores.softcap(30.0), "storage": Storage.FP32},
}


BACKWARD: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal},
    "causal_fused": {"mask": masks.causal, "target": "sm80"},
    "softcap": {"score": scores.softcap(30.0)},
    "slopes": {"mask": masks.causal, "score": scores.alibi(SLOPES)},
    "relative_bias": {"score": scores.relative_bias(torch.ones(8, 255))},
    "hopper_plain": {"hopper": True, "head_dim": 64},
    "hopper_softcap_causal": {"hopper": True, "mask": masks.causal, "score": scores.softcap(30.0)},
    "hopper_slopes_documents": {
        "hopper": True,
        "learned": False,
        "mask": masks.document(DOCUMENTS),
        "score": scores.alibi(SLOPES),
    },
    "hopper_deterministic_causal": {"hopper": True, "deterministic": True, "mask": masks.causal},
    "hopper_deterministic_documents": {
        "hopper": True,
        "deterministic": True,
        "head_dim": 64,
        "mask": masks.document(DOCUMENTS),
    },
    "hopper_learned_bias": {"hopper": True, "score": scores.relative_bias(torch.ones(8, 255))},
    "hopper_learned_slopes_causal": {"hopper": True, "mask": masks.causal, "score": scores.alibi(SLOPES)},
    "hopper_dropout": {"hopper": True, "mask": masks.causal, "dropout": True},
    "hopper_in_parts_causal": {"hopper": True, "mask": masks.causal, "head_dim": 192, "head_dim_v": 128},
    "hopper_apart_softcap_causal": {
        "hopper": True,
        "mask": masks.causal,
        "score": scores.softcap(30.0),
        "head_dim": 256,
    },
    "padded_sinks_dropout": {"head_dim": 80, "has_sinks": True, "dropout": True},
    "pairs": {"mask": masks.causal, "score": scores.softcap(30.0), "storage": Storage.FP32},
    "hopper_pairs": {"hopper": True, "storage": Storage.FP32},
    "hopper_pairs_softcap_causal": {
        "hopper": True,
        "mask": masks.causal,
        "score": scores.softcap(30.0),
        "head_dim": 96,
        "storage": Storage.FP32,
    },
}


@pytest.mark.parametrize("name", list(BACKWARD))
def test_backward(name: str, golden: Golden) -> None:
    golden(independent_of_the_machine("\n\n".join(generate_backward(**BACKWARD[name]))))


@pytest.mark.parametrize("name", list(CASES))
def test_source(name: str, golden: Golden) -> None:
    golden(independent_of_the_machine(generate(**CASES[name]).source))
