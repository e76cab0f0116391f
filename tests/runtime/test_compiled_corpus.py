"""Every mod of the corpus in one graph of torch.compile: the same numbers as without it."""

from __future__ import annotations

import pytest
import torch

import flexc
from tests.mods import Entry, corpus

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_graph_computes_the_same(entry: Entry) -> None:
    case = entry.make()
    q = torch.randn(case.batch, case.heads, case.q_len, 16)
    k = torch.randn(case.batch, case.kv_heads, case.kv_len, 16)
    v = torch.randn(case.batch, case.kv_heads, case.kv_len, 24)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flexc.attention(q, k, v, mask_mod=case.mask, score_mod=case.score)

    torch.compiler.reset()
    with torch.no_grad():
        out = torch.compile(function, backend="eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(out, function(q, k, v), rtol=1e-5, atol=1e-5)
