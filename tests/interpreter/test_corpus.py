"""The generated kernel of every mod of the corpus, run by Triton's interpreter, against the fp64 golden.

fp16 and fp32 only: the interpreter multiplies bf16 operands as bit patterns (Triton 3.6 to 3.9).
"""

from __future__ import annotations

import pytest
import torch

import flexc
from tests.mods import Entry, corpus
from tests.oracle import golden

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]
TILES = {"block_q": 32, "block_kv": 32, "num_warps": 4, "num_stages": 1}


@pytest.mark.parametrize("entry", ENTRIES)
def test_generated_kernel_is_as_near_to_the_golden_as_plain_pytorch(entry: Entry) -> None:
    case = entry.make()
    dtype = torch.float16 if case.score is None else torch.float32
    q = torch.randn(case.batch, case.heads, case.q_len, 16).to(dtype)
    k = torch.randn(case.batch, case.kv_heads, case.kv_len, 16).to(dtype)
    v = torch.randn(case.batch, case.kv_heads, case.kv_len, 24).to(dtype)
    with torch.no_grad():
        result = flexc.attention(
            q,
            k,
            v,
            mask_mod=case.mask,
            score_mod=case.score,
            return_lse=True,
            backend="triton",
            options=TILES,
        )
        golden(q, k, v, mask_mod=case.mask, score_mod=case.score).check(*result)
