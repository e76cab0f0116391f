"""The Hopper backward in fp32, by pairs of fp16 numbers, on the GPU it is made for, against fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from flexc import masks, scores
from tests.gpu.hopper_gradients import NAMES, check_hopper_backward, hopper_gradients
from tests.gpu.inputs import NEEDS_SM90, random_qkv
from tests.gradients import check_gradients, problem
from tests.mods import corpus

pytestmark = NEEDS_SM90

SINGLE = torch.float32
LENGTHS = ((64, 1), (100, 3000), (3000, 1), (129, 63), (127, 129), (2500, 2500))


def test_lengths() -> None:
    for (q_len, kv_len), mask in product(LENGTHS, (None, masks.sliding_window(77))):
        qkv = random_qkv(q_len, kv_len, heads=3, kv_heads=1, dim=128, dtype=SINGLE)
        check_hopper_backward(*qkv, mask_mod=mask)


@pytest.mark.parametrize("name", ["causal", "document_by_batch", "window_and_first_keys", "alibi_causal"])
def test_mods(name: str) -> None:
    case = corpus()[name].make("cuda")
    qkv = random_qkv(
        case.q_len,
        case.kv_len,
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        dim=128,
        dtype=SINGLE,
    )
    check_hopper_backward(*qkv, mask_mod=case.mask, score_mod=case.score)


@pytest.mark.parametrize(("dim", "dim_v"), [(80, 128), (128, 96)])
def test_head_dims(dim: int, dim_v: int) -> None:
    qkv = random_qkv(700, 777, dim=dim, dim_v=dim_v, dtype=SINGLE)
    check_hopper_backward(*qkv, mask_mod=masks.causal, score_mod=scores.softcap(3.0))


def test_groups_sinks_and_gradients_of_the_lse() -> None:
    qkv = random_qkv(1111, 1111, heads=8, dim=128, dtype=SINGLE)
    slopes = torch.rand(8, device="cuda")
    check_hopper_backward(
        *qkv,
        mask_mod=masks.causal,
        score_mod=scores.alibi(slopes),
        sinks=torch.randn(8, device="cuda"),
        with_lse=True,
    )
    check_hopper_backward(*qkv, score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[h])


@pytest.mark.parametrize(
    "sizes", [(1.0, 1.0, 1.0, 1.0), (6.0, 3.0, 1.0, 1e-8), (1e10, 1e-10, 1e6, 1e3)], ids=str
)
def test_numbers_of_any_size(sizes: tuple[float, ...]) -> None:
    q, k, v = random_qkv(1111, 1500, batch=1, dim=128, dtype=SINGLE)
    given = problem(q * sizes[0], k * sizes[1], v * sizes[2])
    given = replace(given, grad_out=given.grad_out * sizes[3])
    check_gradients(given, hopper_gradients(given, NAMES), NAMES)


def test_the_same_bits_every_time() -> None:
    given = problem(*random_qkv(700, 900, dim=128, dtype=SINGLE), mask_mod=masks.causal, deterministic=True)
    found, again = (hopper_gradients(given, NAMES) for _ in range(2))
    check_gradients(given, found, NAMES)
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(again, name)), name


def test_what_is_hidden_may_be_nan() -> None:
    q, k, v = random_qkv(300, 333, dim=128, dtype=SINGLE)
    given = problem(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx != 7)
    k[:, :, 7], v[:, :, 7] = float("nan"), float("inf")
    found = hopper_gradients(given, NAMES)
    k[:, :, 7], v[:, :, 7] = 0.0, 0.0
    check_gradients(given, found, NAMES)
