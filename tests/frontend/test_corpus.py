"""Every mod of the corpus traces, and its graph computes what PyTorch computes."""

from __future__ import annotations

import pytest
import torch

from flexc.frontend.trace import trace
from flexc.ir.graph import ModKind
from flexc.ir.printer import to_text
from flexc.mods import as_mask_mod, as_score_mod
from tests.frontend.direct import run_directly, run_graph
from tests.mods import Entry, corpus

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_graph_equals_the_function(entry: Entry) -> None:
    case = entry.make()
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    if case.mask is not None:
        assert torch.equal(run_graph(trace(case.mask, ModKind.MASK), shape), run_directly(case.mask, shape))
    if case.score is not None and not entry.out_of_range:
        scores = torch.randn(shape)
        expected = run_directly(case.score, shape, scores)
        actual = run_graph(trace(case.score, ModKind.SCORE), shape, scores)
        torch.testing.assert_close(actual, expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("entry", ENTRIES)
def test_traced_once_and_the_same_for_a_new_closure(entry: Entry) -> None:
    first, second = entry.make(seed=0), entry.make(seed=1)
    for one, other, wrap in (
        (first.mask, second.mask, as_mask_mod),
        (first.score, second.score, as_score_mod),
    ):
        if one is None or other is None:
            continue
        mod = wrap(one)
        made = mod.trace()
        assert mod.trace() is made, "nothing changed, so nothing is traced again"
        again = wrap(other).trace()
        assert to_text(made.graph.root) == to_text(again.graph.root)
        assert made.graph.captures == again.graph.captures


def test_corpus_is_large_and_covers_its_origins() -> None:
    entries = corpus().values()
    origins = [entry.origin for entry in entries]
    assert len(origins) >= 60
    assert {"attn_gym", "transformers", "torch", "flexc"} == set(origins)
    assert all(entry.q_len % 16 or entry.kv_len % 16 or not entry.scales for entry in entries)
    assert all(max(entry.q_len, entry.kv_len) <= 160 for entry in entries)


def test_lengths_only_where_the_mod_allows() -> None:
    assert corpus()["causal"].make(lengths=(300, 500)).kv_len == 500
    with pytest.raises(ValueError, match="fixed lengths"):
        corpus()["natten2d"].make(lengths=(300, 300))


def test_attention_gym_approximate_softcap() -> None:
    from attn_gym.mods.softcapping import _tanh_approx

    def softcap(score, b, h, q_idx, kv_idx):
        return 20 * _tanh_approx(score / 20)

    assert to_text(trace(softcap, ModKind.SCORE).graph.root) == "mul(20.0, tanh(div(score, 20.0)))"
