"""The Hopper backward on the GPU it is made for, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores
from flexc.call import Gradients
from flexc.launcher import recording
from flexc.philox import kept
from tests.gpu.hopper_gradients import MAIN, NAMES, check_hopper_backward, hopper_gradients
from tests.gpu.inputs import HOPPER_MODS, NEEDS_SM90, random_qkv
from tests.gradients import Problem, check_gradients, differentiable_slots, problem
from tests.mods import corpus

pytestmark = NEEDS_SM90


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", HOPPER_MODS)
def test_mods(name: str, dim: int) -> None:
    case = corpus()[name].make("cuda")
    q, k, v = random_qkv(
        case.q_len, case.kv_len, batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, dim=dim
    )
    if case.q_len < 64:
        pytest.skip("few rows are left to the portable kernels")
    check_hopper_backward(q, k, v, mask_mod=case.mask, score_mod=case.score)


@pytest.mark.parametrize("dim", [40, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    qkv = random_qkv(700, 777, dim=dim, dtype=dtype)
    check_hopper_backward(*qkv)
    check_hopper_backward(*qkv, mask_mod=masks.causal, score_mod=scores.softcap(3.0))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(64, 1), (100, 3000), (3000, 1), (129, 63), (127, 129), (2500, 2500)]
)
def test_lengths(q_len: int, kv_len: int, dim: int) -> None:
    for mask in (None, masks.sliding_window(77)):
        check_hopper_backward(*random_qkv(q_len, kv_len, heads=3, kv_heads=1, dim=dim), mask_mod=mask)


@pytest.mark.parametrize("dim", [64, 128])
def test_groups_sinks_and_gradients_of_the_lse(dim: int) -> None:
    qkv = random_qkv(1111, 1111, heads=8, dim=dim)
    arguments: dict[str, Any] = {"sinks": torch.randn(8, device="cuda"), "with_lse": True}
    slopes = torch.rand(8, device="cuda")
    check_hopper_backward(*qkv, mask_mod=masks.causal, score_mod=scores.alibi(slopes), **arguments)
    check_hopper_backward(*qkv, score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[h], **arguments)


def _learned(kind: str, heads: int, q_len: int, kv_len: int) -> Callable[..., Any]:
    """Scores with biases by distance, by key, by both, and by head."""
    by_key = torch.randn(heads, kv_len, device="cuda")
    relative = scores.relative_bias(torch.randn(heads, 2 * max(q_len, kv_len) - 1, device="cuda"))
    found: dict[str, Callable[..., Any]] = {
        "distance": relative,
        "key": lambda s, b, h, q_idx, kv_idx: s + by_key[h, kv_idx],
        "distance_and_key": lambda s, b, h, q_idx, kv_idx: (
            relative(s, b, h, q_idx, kv_idx) + by_key[b, kv_idx] * 0.5
        ),
        "slopes": scores.alibi(torch.rand(heads, device="cuda")),
    }
    return found[kind]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["distance", "key", "distance_and_key", "slopes"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len"), [(4, 2, 300, 300), (3, 1, 129, 513), (4, 4, 1000, 200)]
)
def test_learned(kind: str, dim: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> None:
    score = _learned(kind, heads, q_len, kv_len)
    for mask in (None, masks.causal):
        qkv = random_qkv(q_len, kv_len, heads=heads, kv_heads=kv_heads, dim=dim)
        check_hopper_backward(*qkv, learned=True, mask_mod=mask, score_mod=score)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["distance", "key", "slopes"])
def test_learned_with_dropout(kind: str, dim: int) -> None:
    score = _learned(kind, 4, 300, 333)
    for mask in (None, masks.causal):
        qkv = random_qkv(300, 333, dim=dim)
        check_hopper_backward(
            *qkv, learned=True, mask_mod=mask, score_mod=score, dropout_p=0.3, dropout_seed=3
        )


@pytest.mark.parametrize("kind", ["distance", "key", "slopes"])
def test_learned_beside_what_is_hidden(kind: str) -> None:
    q, k, v = random_qkv(300, 333, dim=64)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx) & (q_idx % 3 != 0)

    score = _learned(kind, 4, 300, 333)
    clean = problem(q.clone(), k.clone(), v.clone(), mask_mod=even, score_mod=score)
    names: tuple[str | int, ...] = ("q", "k", "v", *differentiable_slots(clean.call))
    k[:, :, 1::2] = v[:, :, 1::2] = q[:, :, ::3] = float("nan")
    given = problem(q, k, v, mask_mod=even, score_mod=score)
    found = hopper_gradients(Problem(given.call, clean.grad_out, None), names)
    check_gradients(clean, found, names)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dropout(dim: int, dtype: torch.dtype) -> None:
    slopes = torch.rand(8, device="cuda")
    qkv = random_qkv(700, 777, heads=8, dim=dim, dtype=dtype)
    for seed, p in ((3, 0.1), (2**62 + 11, 0.7)):
        arguments: dict[str, Any] = {"dropout_seed": seed, "dropout_p": p}
        check_hopper_backward(*qkv, **arguments)
        check_hopper_backward(*qkv, mask_mod=masks.causal, score_mod=scores.softcap(3.0), **arguments)
        sinks = torch.randn(8, device="cuda")
        check_hopper_backward(*qkv, score_mod=scores.alibi(slopes), sinks=sinks, with_lse=True, **arguments)


@pytest.mark.parametrize(("dim", "group"), [(64, 1), (128, 1), (128, 4)])
@pytest.mark.parametrize("seed", [0, 2**31 + 5, 2**63 - 1, 2**64 - 2**40])
def test_dropout_drops_the_same_pairs(seed: int, dim: int, group: int) -> None:
    """With equal scores and one-hot gradients dV is the weights that are left."""
    q, k, v = random_qkv(300, 333, heads=4, kv_heads=4 // group, dim=dim)
    call = problem(q * 0, k, v, dropout_p=0.25, dropout_seed=seed).call
    b, h, first = 1, 3, 101
    rows = torch.arange(first, min(first + dim, 300), device="cuda")
    grad_out = torch.zeros_like(q)
    grad_out[b, h, rows, rows - first] = 1
    found = hopper_gradients(Problem(call, grad_out, None), ("q", "v")).v
    assert found is not None
    columns = torch.arange(333, device="cuda")
    stream = torch.tensor(b * 4 + h, device="cuda")
    expected = kept(seed, 0.25, stream, rows[:, None], columns[None, :])
    weights = found[b, h // group][:, : len(rows)].T
    assert torch.equal(weights != 0, expected)
    assert torch.allclose(weights[expected].float(), torch.tensor(1 / 333 / 0.75, device="cuda"), rtol=1e-2)


@pytest.mark.parametrize("dim", [64, 128])
def test_dropout_of_everything(dim: int) -> None:
    q, k, v = random_qkv(200, 200, dim=dim)
    found = hopper_gradients(problem(q, k, v, dropout_p=1.0, mask_mod=masks.causal), ("q", "k", "v"))
    for gradient in (found.q, found.k, found.v):
        assert gradient is not None
        assert (gradient == 0).all()


def test_heads_that_see_different_keys() -> None:
    reach = torch.tensor([0, 5, 300, 2000], device="cuda", dtype=torch.int32)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < reach[h])

    check_hopper_backward(*random_qkv(900, 900, heads=4, kv_heads=1, dim=128), mask_mod=window)


def _of_rows(kind: str, q_len: int, kv_len: int) -> dict[str, Any]:
    """Mods that read captured tensors by the row, of several types."""
    heads = torch.arange(4, device="cuda")[:, None]
    ids = torch.arange(max(q_len, kv_len), device="cuda") // 77
    of_head = (ids // (1 + heads)).to(torch.int32)
    alive = torch.arange(q_len, device="cuda") % 5 != 2
    bias = torch.linspace(-2.0, 2.0, q_len, device="cuda")
    reach = 20 + torch.arange(q_len, device="cuda", dtype=torch.int32) % 300
    mods: dict[str, dict[str, Any]] = {
        "long": {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])},
        "heads": {"mask_mod": lambda b, h, q_idx, kv_idx: of_head[h, q_idx] == of_head[h, kv_idx]},
        "bool": {"mask_mod": lambda b, h, q_idx, kv_idx: alive[q_idx] & (q_idx >= kv_idx)},
        "score": {"score_mod": lambda score, b, h, q_idx, kv_idx: score * (1.0 + bias[q_idx] * (h + 1))},
        "both": {
            "mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx < reach[q_idx]) | (ids[q_idx] == ids[kv_idx]),
            "score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[q_idx] * kv_idx * 0.01,
        },
    }
    return mods[kind]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["long", "heads", "bool", "score", "both"])
def test_rows_from_memory(kind: str, dim: int, deterministic: bool) -> None:
    for q_len, kv_len in ((700, 643), (330, 900)):
        check_hopper_backward(
            *random_qkv(q_len, kv_len, dim=dim), deterministic=deterministic, **_of_rows(kind, q_len, kv_len)
        )


@pytest.mark.parametrize(
    "name",
    ["plain", "causal", "document_by_batch", "window_and_first_keys", "softcap_window", "nothing_allowed"],
)
def test_one_warpgroup(name: str) -> None:
    case = corpus()["causal" if name == "plain" else name].make("cuda")
    mask, score = (None, None) if name == "plain" else (case.mask, case.score)
    heads, kv_heads = case.heads, case.kv_heads
    qkv = random_qkv(max(case.q_len, 64), case.kv_len, batch=case.batch, heads=heads, kv_heads=kv_heads)
    options = {"backward_block_q": 64, "backward_block_kv": 64}
    check_hopper_backward(*qkv, mask_mod=mask, score_mod=score, options=options)


@pytest.mark.parametrize("mask", [None, masks.causal], ids=["plain", "causal"])
def test_kernels_wait_for_those_before(mask: Any) -> None:
    """Short kernels of many backwards, each of which may begin before the one before it has ended."""
    inputs = [[x.requires_grad_() for x in random_qkv(n, n, dim=64)] for n in (300, 700)]
    results = [flexc.attention(*x, mask_mod=mask) for x in inputs]
    weights = [torch.randn_like(out) for out in results]
    expected = None
    for _ in range(40):
        found = [
            torch.autograd.grad(out, x, w, retain_graph=True)
            for out, x, w in zip(results, inputs, weights, strict=True)
        ]
        expected = expected or found
        for wanted, gradients in zip(expected, found, strict=True):
            assert torch.equal(gradients[1], wanted[1])
            assert torch.equal(gradients[2], wanted[2])
            assert torch.allclose(gradients[0].float(), wanted[0].float(), rtol=2e-2, atol=1e-3)


def test_strides_and_scales() -> None:
    whole = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    check_hopper_backward(q, k, v, mask_mod=masks.causal)
    check_hopper_backward(q[..., 8:40], k[..., 16:48], v[..., :32])
    for scale in (0.0, -0.3, 2.0):
        check_hopper_backward(q, k, v, mask_mod=masks.causal, scale=scale)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_what_no_row_sees_and_rows_without_keys_have_no_effect(poison: float, dim: int, p: float) -> None:
    q, k, v = random_qkv(300, 333, dim=dim)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx) & (q_idx % 3 != 0)

    clean = problem(q.clone(), k.clone(), v.clone(), mask_mod=even, dropout_p=p, dropout_seed=5)
    k[:, :, 1::2] = poison
    v[:, :, 1::2] = poison
    q[:, :, ::3] = poison
    given = problem(q, k, v, mask_mod=even, dropout_p=p, dropout_seed=5)
    names = ("q", "k", "v")
    found = hopper_gradients(Problem(given.call, clean.grad_out, None), names)
    check_gradients(clean, found, names)


def test_a_nan_that_is_seen_is_not_hidden() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(300, 300, dim=128))
    with torch.no_grad():
        v[0, 0, 10] = float("nan")
    flexc.attention(q, k, v, mask_mod=masks.causal).sum().backward()
    assert q.grad is not None
    assert q.grad[0, :2, 10:].isnan().any()
    assert not q.grad[1].isnan().any()


def test_streams_and_graphs() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(1500, 1500, heads=8, dim=128))
    weights = torch.randn_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        out = flexc.attention(q, k, v, mask_mod=masks.causal)
        return torch.autograd.grad(out, (q, k, v), weights)

    expected = step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured[1], expected[1])
        assert torch.equal(captured[2], expected[2])
        # dQ is added up in any order.
        assert torch.allclose(captured[0].float(), expected[0].float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", [*HOPPER_MODS[:7], "plain"])
def test_deterministic_gradients_are_right_and_the_same_bits(name: str, dim: int) -> None:
    case = corpus()["causal" if name == "plain" else name].make("cuda")
    if case.q_len < 64:
        pytest.skip("few rows are left to the portable kernels")
    heads, kv_heads = case.heads, case.kv_heads
    qkv = random_qkv(case.q_len, case.kv_len, batch=case.batch, heads=heads, kv_heads=kv_heads, dim=dim)
    mask, score = (None, None) if name == "plain" else (case.mask, case.score)
    given = problem(*qkv, mask_mod=mask, score_mod=score, deterministic=True)
    found = hopper_gradients(given, NAMES)
    check_gradients(given, found, NAMES)
    _check_repeats(given, found)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["distance", "key", "distance_and_key"])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_deterministic_gradients_of_captured_tensors(kind: str, dim: int, p: float) -> None:
    score = _learned(kind, 6, 513, 513)
    for mask in (None, masks.causal):
        qkv = random_qkv(513, 513, heads=6, kv_heads=2, dim=dim)
        facts: dict[str, Any] = {"deterministic": True, "dropout_p": p, "dropout_seed": 5}
        given = problem(*qkv, mask_mod=mask, score_mod=score, **facts)
        names: tuple[str | int, ...] = (*NAMES, *differentiable_slots(given.call))
        found = hopper_gradients(given, names)
        check_gradients(given, found, names)
        _check_repeats(given, found, names)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, masks.causal, masks.causal & masks.sliding_window(300)])
def test_more_deterministic_programs_than_run_at_a_time(mask: Any, dim: int) -> None:
    given = problem(
        *random_qkv(2500, 2600, heads=32, kv_heads=16, dim=dim), mask_mod=mask, deterministic=True
    )
    found = hopper_gradients(given, NAMES)
    _check_repeats(given, found)
    # In another order of additions, in fp32.
    other = hopper_gradients(replace(given, call=replace(given.call, deterministic=False)), NAMES)
    for name in NAMES:
        x, y = getattr(found, name), getattr(other, name)
        assert (
            torch.allclose(x.float(), y.float(), rtol=2e-2, atol=1e-3) if name == "q" else torch.equal(x, y)
        )


def _check_repeats(given: Problem, found: Gradients, names: tuple[str | int, ...] = NAMES) -> None:
    """Runs beside other work, which changes when programs begin, give the same bits."""
    side, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(side):
            for _ in range(4):
                x = (x @ x).clamp(-1, 1)
        again = hopper_gradients(given, names)
        for name in names:
            one, other = (
                g.values[name] if isinstance(name, int) else getattr(g, name) for g in (again, found)
            )
            assert one is not None
            assert other is not None
            assert torch.equal(one, other), name
    torch.cuda.synchronize()


def test_what_it_leaves_to_the_portable_kernels() -> None:
    q, k, v = random_qkv(300, 300)
    # All distances from 4 on share an element.
    table = torch.rand(4, 9, device="cuda", requires_grad=True)
    x = q.clone().requires_grad_()
    out = flexc.attention(x, k, v, score_mod=scores.relative_bias(table))
    with recording() as launched:
        out.sum().backward()
    assert MAIN not in [kernel.entry for kernel in launched]
