"""Gradients on the CPU: of every mod of the corpus, of every kind of input, against autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc.mods import as_score_mod
from tests.mods import Case, Entry, corpus
from tests.oracle import golden_gradients

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]
WITH_SCORES = [pytest.param(entry, id=name) for name, entry in corpus().items() if entry.kind != "mask"]


def _inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, sinks, and gradients of the output and the lse."""
    rows = (case.batch, case.heads, case.q_len)
    return [
        torch.randn(*rows, 16).to(dtype),
        torch.randn(case.batch, case.kv_heads, case.kv_len, 16).to(dtype),
        torch.randn(case.batch, case.kv_heads, case.kv_len, 24).to(dtype),
        torch.randn(case.heads),
        torch.randn(*rows, 24).to(dtype),
        torch.randn(rows),
    ]


def _captured(case: Case) -> list[torch.Tensor]:
    """The floating tensors that the score_mod captures, each once, asking for a gradient if one exists."""
    if case.score is None:
        return []
    trace = as_score_mod(case.score).trace()
    found = {id(x): x for x in trace.values if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return [x.requires_grad_() for x in found.values()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_corpus(entry: Entry) -> None:
    _check(entry, torch.float32)


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        pytest.param(*entry.values, dtype, id=f"{entry.id}-{dtype}")
        for n, entry in enumerate(WITH_SCORES)
        for d, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16))
        if n % 3 == d
    ],
)
def test_the_scores_of_the_corpus_in_other_dtypes(entry: Entry, dtype: torch.dtype) -> None:
    _check(entry, dtype)


def _check(entry: Entry, dtype: torch.dtype) -> None:
    case = entry.make()
    captured = _captured(case)
    q, k, v, sinks, grad_out, grad_lse = _inputs(case, dtype)
    mods: dict[str, Any] = {"mask_mod": case.mask, "score_mod": case.score}
    expected = golden_gradients(q, k, v, grad_out, grad_lse, sinks=sinks, captured=captured, **mods)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)] + captured
    out, lse = flexc.attention(q, k, v, sinks=sinks, return_lse=True, backend="cpu", **mods)
    grads = torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse.to(lse.dtype)], allow_unused=True)
    expected.check([torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)])
