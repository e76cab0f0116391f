"""The Hopper backward of heads above 128 on the GPU it is made for, against fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from flexc import backends, masks, scores
from tests.gpu.hopper_gradients import NAMES, check_hopper_backward
from tests.gpu.inputs import NEEDS_SM90, random_qkv
from tests.gradients import check_gradients, problem
from tests.mods import corpus

pytestmark = NEEDS_SM90

ENTRIES = ("causal", "document_by_batch", "whole_rows_masked", "window_and_first_keys", "alibi_causal")
VALUES = {192: 128, 256: 256}
"""Head dimensions of v beside those of q: those that kernels were made for."""


LENGTHS = ((64, 1), (100, 3000), (3000, 1), (129, 63), (127, 129), (2500, 2500))


@pytest.mark.parametrize("dim", [192, 256])
def test_lengths(dim: int) -> None:
    for (q_len, kv_len), mask in product(LENGTHS, (None, masks.sliding_window(77))):
        qkv = random_qkv(q_len, kv_len, heads=3, kv_heads=1, dim=dim, dim_v=VALUES[dim])
        check_hopper_backward(*qkv, mask_mod=mask)


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("name", ENTRIES)
def test_mods(name: str, dim: int) -> None:
    case = corpus()[name].make("cuda")
    q, k, v = random_qkv(
        case.q_len,
        case.kv_len,
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        dim=dim,
        dim_v=VALUES[dim],
    )
    if case.q_len < 64:
        pytest.skip("few rows are left to the portable kernels")
    check_hopper_backward(q, k, v, mask_mod=case.mask, score_mod=case.score)


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [
        (136, 80, torch.bfloat16),
        (160, 128, torch.float16),
        (192, 192, torch.bfloat16),
        (80, 200, torch.float16),
        (256, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_head_dims(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    qkv = random_qkv(700, 777, dim=dim, dim_v=dim_v, dtype=dtype)
    check_hopper_backward(*qkv, mask_mod=masks.causal, score_mod=scores.softcap(3.0))


@pytest.mark.parametrize("dim", [192, 256])
def test_groups_sinks_and_gradients_of_the_lse(dim: int) -> None:
    qkv = random_qkv(1111, 1111, heads=8, dim=dim, dim_v=VALUES[dim])
    slopes = torch.rand(8, device="cuda")
    check_hopper_backward(
        *qkv,
        mask_mod=masks.causal,
        score_mod=scores.alibi(slopes),
        sinks=torch.randn(8, device="cuda"),
        with_lse=True,
    )
    check_hopper_backward(*qkv, score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[h])


def test_deterministic() -> None:
    given = problem(*random_qkv(700, 900, dim=192, dim_v=128), mask_mod=masks.causal, deterministic=True)
    out, lse = backends.forward(given.call, "auto")
    assert lse is not None
    found, again = (
        backends.backward(given.call, "auto", out, lse, given.grad_out, None, frozenset(NAMES))
        for _ in range(2)
    )
    check_gradients(given, found, NAMES)
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(again, name)), name


@pytest.mark.parametrize("dim", [192, 256])
def test_what_is_hidden_may_be_nan(dim: int) -> None:
    q, k, v = random_qkv(300, 333, dim=dim, dim_v=VALUES[dim])
    given = problem(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx != 7)
    k[:, :, 7], v[:, :, 7] = float("nan"), float("inf")
    out, lse = backends.forward(given.call, "auto")
    assert lse is not None
    found = backends.backward(given.call, "auto", out, lse, given.grad_out, None, frozenset(NAMES))
    k[:, :, 7], v[:, :, 7] = 0.0, 0.0
    check_gradients(given, found, NAMES)
