"""Hopper backwards of mods of every kind: the machine code holds what their design promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc.artifact import Artifact
from flexc.toolchain import disassemble
from tests.compile.machine_code import Promise, check
from tests.compile.test_hopper import FORMS, MODS

# Loads a pair, whose addresses occupy the registers: they compile, and keep more of them in memory.
LOADING = ("relative_bias", "natten2d", "tree")
# The derivative of erf: more numbers a pair than registers at 128.
HEAVY = ("gym_activation_gelu",)


def _compile(name: str, head_dim: int, **arguments: Any) -> tuple[Artifact, ...]:
    mask, score = MODS[name]
    kernel = flexc.compile(
        mask_mod=mask, score_mod=score, head_dim=head_dim, backward=True, backend="hopper", **arguments
    )
    return kernel.backward_artifacts


def _check(parts: tuple[Artifact, ...], spills: int) -> None:
    (main,) = (a for a in parts if a.entry == "attention_backward")
    sass = disassemble(main.cubin)
    check(sass, main.resources, Promise(2, (240, 24), spills=spills))
    assert "UTMAREDG" in sass


@pytest.mark.parametrize(("name", "head_dim"), FORMS)
def test_machine_code(name: str, head_dim: int) -> None:
    _check(_compile(name, head_dim), 400 if name in LOADING else 700 if name in HEAVY else 16)


@pytest.mark.parametrize(("head_dim", "dtype"), [(96, torch.float16), (40, torch.bfloat16)])
def test_other_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    _check(_compile("softcap_causal", head_dim, dtype=dtype), 16)


def test_kernels_of_a_backward() -> None:
    entries = [a.entry for a in _compile("causal", 64)]
    expected = ["rows", "", "finish", "kv", "q"]
    assert entries == ["_".join(["attention_backward", part]).rstrip("_") for part in expected]
    assert [a.entry for a in _compile("plain", 64)] == entries[:3]
