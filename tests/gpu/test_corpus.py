"""Every mod of the corpus on the GPU, against the fp64 golden."""

from __future__ import annotations

import pytest
import torch

import flexc
from tests.mods import Case, Entry, corpus
from tests.oracle import golden

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]
SCALABLE = [pytest.param(entry, id=name) for name, entry in corpus().items() if entry.scales]


def _check(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(case.batch, case.heads, case.q_len, head_dim, device="cuda").to(dtype)
    k = torch.randn(case.batch, case.kv_heads, case.kv_len, head_dim, device="cuda").to(dtype)
    v = torch.randn(case.batch, case.kv_heads, case.kv_len, head_dim, device="cuda").to(dtype)
    with torch.no_grad():
        out, lse = flexc.attention(q, k, v, mask_mod=case.mask, score_mod=case.score, return_lse=True)
        golden(q, k, v, mask_mod=case.mask, score_mod=case.score).check(out, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_small(entry: Entry, dtype: torch.dtype) -> None:
    _check(entry.make("cuda"), 64, dtype)


@pytest.mark.parametrize("entry", SCALABLE)
def test_longer(entry: Entry) -> None:
    q_len = 700 if entry.q_len != entry.kv_len else 1111
    _check(entry.make("cuda", lengths=(q_len, 1111)), 128, torch.bfloat16)
