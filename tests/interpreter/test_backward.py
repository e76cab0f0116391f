"""The kernels of the backward, run by Triton's interpreter, against gradients in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexc import masks, reference, scores
from flexc.call import Gradients
from flexc.codegen.arguments import Source
from flexc.codegen.backward_spec import Entry as Part
from flexc.gpu import run
from flexc.gpu_backward import _Backward, backward
from flexc.interpret_backward import Interpreter
from tests.gradients import Problem, check_gradients, differentiable_slots, gradients, problem
from tests.mods import Entry, corpus

ENTRIES = [pytest.param(entry, n % 2 == 0, id=name) for n, (name, entry) in enumerate(corpus().items())]
"""Every mod, and whether one kernel or two compute its gradients: they take turns."""
TILES = {"block_q": 32, "block_kv": 32, "num_warps": 4, "num_stages": 1}
OPTIONS = {**TILES, **{f"backward_{name}": value for name, value in TILES.items()}}
LARGE = {**OPTIONS, "block_q": 64, "block_kv": 64, "backward_block_q": 64, "backward_block_kv": 64}


def _qkv(
    q_len: int, kv_len: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 16, dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return (
        torch.randn(2, heads, q_len, dim).to(dtype),
        torch.randn(2, kv_heads, kv_len, dim).to(dtype),
        torch.randn(2, kv_heads, kv_len, dim_v or dim).to(dtype),
    )


def _backward(given: Problem, names: tuple[str | int, ...]) -> Gradients:
    out, lse = run(given.call)
    assert lse is not None
    return backward(given.call, out, lse, given.grad_out, given.grad_lse, frozenset(names))


def _check(*qkv: torch.Tensor, queries_too: bool = True, **arguments: Any) -> Gradients:
    given = problem(*qkv, **{"options": OPTIONS, **arguments})
    names: tuple[str | int, ...] = ("q", "k", "v", *differentiable_slots(given.call))
    if given.call.sinks is not None:
        names = (*names, "sinks")
    actual = _backward(given, names)
    check_gradients(given, actual, names)
    # One kernel gave them all; this one walks the keys of each query.
    if queries_too and not given.call.deterministic:
        check_gradients(given, _backward(given, ("q",)), ("q",))
    return actual


@pytest.mark.parametrize(("entry", "fused"), ENTRIES)
def test_every_mod(entry: Entry, fused: bool) -> None:
    case = entry.make()
    dtype = torch.float16 if case.score is None else torch.float32
    q = torch.randn(1, case.heads, case.q_len, 16).to(dtype)
    k = torch.randn(1, case.kv_heads, case.kv_len, 16).to(dtype)
    v = torch.randn(1, case.kv_heads, case.kv_len, 24).to(dtype)
    options = {**LARGE, "backward_fused": fused}
    _check(q, k, v, queries_too=False, mask_mod=case.mask, score_mod=case.score, options=options)


@pytest.mark.parametrize("dim", [1, 31, 72])
def test_head_dims_are_padded(dim: int) -> None:
    _check(*_qkv(37, 45, dim=dim), mask_mod=masks.causal)


@pytest.mark.parametrize(("dim", "dim_v"), [(300, 300), (16, 512), (260, 64)])
def test_wide_heads_of_single_precision_are_shared_out(dim: int, dim_v: int) -> None:
    bias, options = scores.relative_bias(torch.randn(2, 91)), {**OPTIONS, "block_q": 16, "block_kv": 16}
    qkv = _qkv(20, 28, heads=2, kv_heads=1, dim=dim, dim_v=dim_v)  # two tiles each way
    _check(*qkv, mask_mod=masks.causal, score_mod=bias, options=options)
    _check(*qkv, deterministic=True, with_lse=True, options=options)


def test_values_of_another_head_dim() -> None:
    _check(*_qkv(40, 50, dim=24, dim_v=40))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (7, 1), (6, 6)])
@pytest.mark.parametrize("kv_len", [33, 200])
def test_groups_are_shared_out_among_programs(heads: int, kv_heads: int, kv_len: int) -> None:
    _check(*_qkv(20, kv_len, heads=heads, kv_heads=kv_heads), mask_mod=masks.causal)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 100), (100, 1), (33, 16), (32, 17), (64, 64)])
def test_any_lengths(q_len: int, kv_len: int) -> None:
    _check(*_qkv(q_len, kv_len), mask_mod=masks.sliding_window(9), with_lse=True)
    _check(*_qkv(q_len, kv_len))


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(q_len: int, kv_len: int) -> None:
    _check(*_qkv(q_len, kv_len), mask_mod=masks.causal)
    _check(*_qkv(q_len, kv_len))


def test_strides_are_read_in_place_and_kept() -> None:
    whole = torch.randn(2, 60, 3, 4, 16)  # one projection: q, k and v side by side, sequence-major
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    _check(q, k, v, mask_mod=masks.causal)
    _check(q.expand(2, 4, 60, 16), k[:1].expand(2, 4, 60, 16), v)
    q = torch.randn(2, 60, 4, 16).transpose(1, 2)
    assert _check(q, k, v).q.stride() == q.stride()  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale: float) -> None:
    _check(*_qkv(40, 40), mask_mod=masks.causal, scale=scale)


def test_the_gradient_of_the_lse() -> None:
    _check(*_qkv(40, 50), with_lse=True)
    _check(*_qkv(40, 50), mask_mod=masks.causal, with_lse=True)


def test_sinks() -> None:
    sinks = torch.tensor([0.5, -1.0, float("-inf"), 3.0])
    _check(*_qkv(40, 40), mask_mod=masks.causal, sinks=sinks, with_lse=True)
    _check(*_qkv(40, 40), sinks=torch.randn(8)[::2])


def test_rows_and_tiles_without_keys_have_gradients_of_zero() -> None:
    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= 40) & (kv_idx >= 20) & (q_idx % 3 != 1)

    actual = _check(*_qkv(70, 50), mask_mod=late, with_lse=True)
    assert actual.q is not None
    assert actual.k is not None
    assert (actual.q[:, :, :40] == 0).all()
    assert (actual.k[:, :, :20] == 0).all()
    _check(*_qkv(70, 50), mask_mod=late, sinks=torch.randn(4), with_lse=True)


@pytest.mark.parametrize("dim", [16, 300])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_no_row_sees_and_rows_without_keys_have_no_effect(poison: float, dim: int) -> None:
    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx) & (q_idx % 5 != 3)

    q, k, v = _qkv(40, 48, heads=2, kv_heads=1, dim=dim)
    given = problem(q, k, v, mask_mod=even, options={**OPTIONS, "block_q": 16, "block_kv": 16})
    clean = _backward(given, ("q", "k", "v"))
    k[:, :, 1::2] = poison
    v[:, :, 1::2] = poison
    q[:, :, 3::5] = poison
    given.grad_out[:, :, 3::5] = poison
    poisoned = _backward(given, ("q", "k", "v"))
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name
    for names in (("q",), ("k", "v")):  # by two kernels
        apart = _backward(given, names)
        for name in names:
            torch.testing.assert_close(getattr(apart, name), getattr(clean, name))


def test_unseen_values_do_not_reach_the_delta_of_captured_tensors() -> None:
    gain = torch.tensor(0.7)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(s * gain) + gain

    q, k, v = (x.half() for x in _qkv(40, 48, heads=2, kv_heads=1))
    for score_mod in (score, scores.temperature(gain)):
        given = problem(q, k, v.clone(), mask_mod=even, score_mod=score_mod, options=OPTIONS)
        clean = _backward(given, ("k", 0))
        given.call.v[:, :, 1::2] = float("nan")
        poisoned = _backward(given, ("k", 0))
        assert torch.equal(clean.k, poisoned.k)  # type: ignore[arg-type]
        assert torch.equal(clean.values[0], poisoned.values[0])  # type: ignore[arg-type]


def test_a_map_with_large_blocks_is_walked_in_tiles() -> None:
    import flexc

    q, k, v = _qkv(150, 170, heads=2, kv_heads=1)
    block_mask = flexc.create_block_mask(masks.causal, 1, 1, 150, 170, device="cpu", BLOCK_SIZE=(64, 128))
    _check(q, k, v, block_mask=block_mask)


def test_only_what_is_wanted_is_computed() -> None:
    given = problem(*_qkv(20, 20), options=OPTIONS)
    only_q = _backward(given, ("q",))
    assert only_q.q is not None
    assert only_q.k is None
    assert only_q.v is None


@pytest.mark.parametrize("lengths", [(75, 75), (40, 75), (75, 40)], ids=str)
def test_one_kernel_or_two(lengths: tuple[int, int]) -> None:
    for mask in (None, masks.causal, masks.sliding_window(19) | masks.prefix_lm(10)):
        for fused in (True, False):
            qkv = _qkv(*lengths, heads=2, kv_heads=1)
            _check(*qkv, mask_mod=mask, options={**OPTIONS, "backward_fused": fused})


def test_deterministic_gradients_are_the_bits_of_two_kernels() -> None:
    q, k, v = _qkv(75, 75)
    given = problem(q, k, v, mask_mod=masks.causal, deterministic=True, options=OPTIONS)
    apart = replace(given.call, deterministic=False, options=(*given.call.options, ("backward_fused", False)))
    names = ("q", "k", "v")
    first, second = _backward(given, names), _backward(replace(given, call=apart), names)
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


SCORES = {
    "per head": scores.alibi(torch.rand(4)),
    "by distance": scores.relative_bias(torch.randn(4, 45)),
    "a number": scores.temperature(torch.tensor(0.7)),
}


@pytest.mark.parametrize("name", list(SCORES))
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors(name: str, deterministic: bool) -> None:
    _check(
        *_qkv(45, 70),
        mask_mod=masks.causal,
        score_mod=SCORES[name],
        deterministic=deterministic,
        options={**OPTIONS, "backward_block_kv": 64},
    )


@pytest.mark.parametrize("name", ["gym_sandwich", "dot_in_a_score", "torch_dot_in_a_score"])
def test_gradients_of_captured_tensors_that_rows_share_in_16_bits(name: str) -> None:
    case = corpus()[name].make()
    q, k, v = _qkv(case.q_len, case.kv_len, heads=case.heads, kv_heads=case.kv_heads, dim=64)
    qkv = (x[: case.batch].half() for x in (q, k, v))
    _check(*qkv, mask_mod=case.mask, score_mod=case.score, options=LARGE)


@pytest.mark.parametrize("with_lse", [False, True])
def test_delta_is_found_where_sinks_dropout_and_lse_change_it(with_lse: bool) -> None:
    bias, sinks = scores.relative_bias(torch.randn(4, 200)), torch.randn(4)
    qkv = [x.half() for x in _qkv(100, 100, dim=64)]
    _check(*qkv, mask_mod=masks.causal, score_mod=bias, sinks=sinks, with_lse=with_lse)
    _check(*qkv, score_mod=bias, dropout_p=0.3, dropout_seed=5, with_lse=with_lse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors_read_in_every_way(deterministic: bool) -> None:
    rows, columns, pairs = torch.randn(80), torch.randn(40), torch.randn(4, 40, 40)
    dense, gain = torch.randn(2, 4, 40, 40), torch.rand(2)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        first = score * gain[b] + rows[q_idx] + rows[kv_idx + 40] + columns[kv_idx // 3]
        return first + pairs[h, q_idx, kv_idx] * columns[(q_idx * kv_idx) % 40] + dense[b, h, q_idx, kv_idx]

    _check(*_qkv(40, 40), score_mod=score, deterministic=deterministic, with_lse=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_elements_that_the_score_chooses(deterministic: bool) -> None:
    """The one that the score before the score_mod means, not the one after it."""
    buckets = torch.randn(64)
    q, k, v = _qkv(37, 45)

    def by_bucket(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + buckets[(4 * score + 32.5).long().clamp(0, 63)]

    whole = (q.round(), k.round(), v)  # their products are exact: no bucket depends on the last place
    _check(*whole, mask_mod=masks.causal, score_mod=by_bucket, deterministic=deterministic)


def test_gradients_of_captured_tensors_are_the_same_bits_in_any_order() -> None:
    bias = torch.randn(4, 45)
    given = problem(*_qkv(45, 45), score_mod=scores.relative_bias(bias), deterministic=True, options=OPTIONS)
    slots = differentiable_slots(given.call)
    first = _backward(given, slots)
    # Batches in another order.
    flipped = replace(given.call, **{n: getattr(given.call, n).flip(0) for n in ("q", "k", "v")})
    second = _backward(Problem(flipped, given.grad_out.flip(0), None), slots)
    assert torch.equal(first.values[slots[0]], second.values[slots[0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [3, 2**63 + 2**40 + 5])
def test_dropout_drops_the_same_weights_as_the_reference(seed: int) -> None:
    given = problem(*_qkv(40, 50), mask_mod=masks.causal, dropout_p=0.3, dropout_seed=seed, options=OPTIONS)
    out, lse = run(given.call)
    expected, _ = reference.run(given.call)
    torch.testing.assert_close(out, expected)
    undropped = run(replace(given.call, dropout_p=0.0))[1]
    assert lse is not None
    assert undropped is not None
    assert torch.equal(lse, undropped)
    check_gradients(given, _backward(given, ("q", "k", "v")), ("q", "k", "v"))


def test_dropout_of_everything_and_of_pairs_that_a_bias_is_added_to() -> None:
    _check(*_qkv(20, 40), dropout_p=1.0, dropout_seed=1)
    bias = scores.relative_bias(torch.randn(4, 45))
    _check(*_qkv(20, 40), score_mod=bias, dropout_p=0.5, dropout_seed=7, with_lse=True)


@pytest.mark.parametrize("with_lse", [False, True])
def test_the_gradient_of_sinks_is_exact_where_delta_is(with_lse: bool) -> None:
    bias, sinks = scores.relative_bias(torch.randn(4, 199)), torch.randn(4)
    qkv = [x.half() for x in _qkv(100, 100)]
    given = problem(
        *qkv, mask_mod=masks.causal, score_mod=bias, sinks=sinks, with_lse=with_lse, options=OPTIONS
    )
    found = _backward(given, ("sinks", *differentiable_slots(given.call))).sinks
    assert found is not None
    exact, plain = (gradients(given, dtype)["sinks"].double() for dtype in (torch.float64, None))
    # From the output, which is rounded, it would be no better than plain PyTorch's.
    assert (found.double() - exact).abs().max() * 20 < (plain - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal])
def test_rows_clear_sums(mask: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a Hopper kernel the rows' clears all it adds to, and finds what it finds otherwise.

    In fp32 dQ has a kernel of its own, and nothing is added to it.
    """
    q, k, v = _qkv(70, 40, dim=24, dtype=dtype)
    given = problem(q, k, v, mask_mod=mask, options=OPTIONS)
    out, lse = run(given.call)
    assert lse is not None
    made = _Backward(given.call, out, lse, given.grad_out, None, frozenset("q"))
    made.spec = replace(made.spec, clears_sums=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda shape, **facts: torch.full(shape, 7, **facts))
        made.rows(Part.ROWS, Interpreter().kernel(made.spec, Part.ROWS, given.call))
    assert (Source.GRAD_Q_SUM in made.tensors) is (dtype is torch.float16)
    if dtype is torch.float16:
        sums = made.tensors[Source.GRAD_Q_SUM]
        assert sums.shape == (2, 4, 256, 64)
        assert not sums.any()
    assert (Source.LOST in made.tensors) is (mask is not None)
    if mask is not None:
        assert not made.tensors[Source.LOST].any()
    delta = made.tensors[Source.DELTA][:, :, :70]
    wanted = (given.grad_out.float() * out.float()).sum(3)
    torch.testing.assert_close(delta, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lost", [0, 1])
def test_repairs(lost: int) -> None:
    """Fewer programs than tiles compute all gradients again, if something was lost."""
    q, k, v = _qkv(300, 200, dim=24)
    given = problem(q, k, v, mask_mod=masks.causal, options=OPTIONS)
    out, lse = run(given.call)
    assert lse is not None
    made = _Backward(given.call, out, lse, given.grad_out, None, frozenset("qkv"))
    made.rows(Part.ROWS, Interpreter().kernel(made.spec, Part.ROWS, given.call))
    made.spec = replace(made.spec, repairs=True)
    made.tensors[Source.LOST] = torch.tensor([lost], dtype=torch.int32)
    sources = (Source.GRAD_Q, Source.GRAD_K, Source.GRAD_V)
    for source in sources:
        made.tensors[source].fill_(7)
    for part, stage in ((Part.KV, made.keys_and_values), (Part.Q, made.queries)):
        stage(part, Interpreter().kernel(made.spec, part, given.call))
    found = [made.tensors[source] for source in sources]
    if not lost:
        assert all((x == 7).all() for x in found)
        return
    check_gradients(given, Gradients(found[0], found[1], found[2], None, ()), ("q", "k", "v"))
