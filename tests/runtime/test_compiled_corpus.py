"""Every mod of the corpus in one graph of torch.compile: the same numbers as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc import backends
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


def test_more_masks_than_torch_compile_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the ninth on it runs the function as it is: block-sparse too, never dense."""
    masks = [
        eval(f"lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % {n} != 1)") for n in range(2, 14)
    ]
    used: list[str] = []
    forward = backends.forward

    def noted(call: Any, backend: str, *rest: Any) -> Any:
        used.append(backend)
        return forward(call, backend, *rest)

    for module in ("operators", "execute"):
        monkeypatch.setattr(f"flexc.{module}.forward", noted)

    def function(q: torch.Tensor, mask: Any) -> torch.Tensor:
        return flexc.attention(q, q, q, mask_mod=mask)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager")
    q = torch.randn(1, 2, 40, 8)
    for mask in masks:
        out = compiled(q, mask)
        torch.testing.assert_close(out, flexc.attention(q, q, q, mask_mod=mask, backend="reference"))
    assert [name for name in used if name != "reference"] == ["cpu"] * len(masks)
