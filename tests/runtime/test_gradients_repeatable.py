"""Gradients on the CPU are the same bits each time, whatever the threads do; only what is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flexc
from flexc import backends, cpu_captured, operators
from flexc.call import AttentionCall
from tests.oracle import golden_gradients


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _score(bias: torch.Tensor, strength: torch.Tensor, kind: str) -> Any:
    """Reads `bias` at every pair, along an axis, or by distance; and `strength` everywhere."""

    def by_pair(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * strength + bias[b, h, q_idx, kv_idx]

    def by_pair_of_all_batches(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * strength + bias[0, h, q_idx, kv_idx]

    def by_distance(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * strength + bias[0, 0, 0, q_idx - kv_idx]

    def by_column(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * strength + bias[b, 0, 1, kv_idx] * bias[b, h, q_idx, 0]

    return {
        "pair": by_pair,
        "pair_of_all_batches": by_pair_of_all_batches,
        "distance": by_distance,
        "column": by_column,
    }[kind]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("small", [1 << 20, 0], ids=["own_sums", "shared_sums"])
@pytest.mark.parametrize("kind", ["pair", "pair_of_all_batches", "distance", "column"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_captured_tensors(
    kind: str, small: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sum for each group of tiles, and with one for all as large tensors have."""
    monkeypatch.setattr(cpu_captured, "_SMALL", small)
    q = torch.randn(2, heads[0], 150, 16, requires_grad=True)
    k, v = (torch.randn(2, heads[1], 150, 16, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, heads[0], 150, 150, requires_grad=True)
    strength = torch.tensor(0.8, requires_grad=True)
    score = _score(bias, strength, kind)
    grad = torch.randn(2, heads[0], 150, 16)
    leaves = [q, k, v, bias, strength]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = flexc.attention(q, k, v, mask_mod=causal, score_mod=score, backend="cpu", deterministic=True)
        return torch.autograd.grad(out, leaves, grad)

    first = gradients()
    for _ in range(2):
        assert all(torch.equal(one, two) for one, two in zip(gradients(), first, strict=True))
    golden_gradients(q, k, v, grad, captured=[bias, strength], mask_mod=causal, score_mod=score).check(first)


@pytest.mark.usefixtures("two_threads")
def test_long_rows_and_few_heads() -> None:
    """More columns than a tile keeps from pass to pass, and key heads that several lanes share."""
    q = torch.randn(1, 2, 200, 8, requires_grad=True)
    k, v = (torch.randn(1, 1, 9_000, 8, requires_grad=True) for _ in range(2))
    slope = torch.tensor(0.8, requires_grad=True)

    def every_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + kv_idx) % 3 == 0

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * slope

    arguments: dict[str, Any] = {"mask_mod": every_third, "score_mod": score}
    leaves = [q, k, v, slope]
    grad, grad_lse = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200)

    def gradients() -> tuple[torch.Tensor, ...]:
        results = flexc.attention(q, k, v, return_lse=True, backend="cpu", **arguments)
        return torch.autograd.grad(results, leaves, [grad, grad_lse])

    first = gradients()
    assert all(torch.equal(one, two) for one, two in zip(gradients(), first, strict=True))
    golden_gradients(q, k, v, grad, grad_lse, captured=[slope], **arguments).check(first)


def test_only_what_is_asked_for() -> None:
    """Each input alone gets the gradient that it gets together with all others."""
    q, k, v = (torch.randn(1, 2, 150, 16) for _ in range(3))
    sinks, bias = torch.randn(2), torch.randn(150)
    inputs = [q, k, v, sinks, bias]
    grad, grad_lse = torch.randn(1, 2, 150, 16), torch.randn(1, 2, 150)

    def gradients(asking: list[int], results: slice) -> list[torch.Tensor]:
        x = [t.clone().requires_grad_(i in asking) for i, t in enumerate(inputs)]
        done = flexc.attention(
            *x[:3],
            sinks=x[3],
            mask_mod=causal,
            score_mod=lambda s, b, h, q_idx, kv_idx: s + x[4][kv_idx],
            return_lse=True,
            backend="cpu",
        )
        leaves = [t for t in x if t.requires_grad]
        return list(torch.autograd.grad(done[results], leaves, [grad, grad_lse][results], allow_unused=True))

    for results in (slice(0, 2), slice(0, 1), slice(1, 2)):
        together = gradients([0, 1, 2, 3, 4], results)
        for i in range(5):
            (alone,) = gradients([i], results)
            assert torch.equal(alone, together[i])
    assert (together[2] == 0).all(), "the lse does not depend on v"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_deterministic_mode_is_asked(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def forward(call: AttentionCall, backend: str) -> Any:
        asked.append(call.deterministic)
        return backends.forward(call, backend)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flexc.attention(q, q, q)

    monkeypatch.setattr(operators, "forward", forward)
    torch.compiler.reset()
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    try:
        for mode in (False, True, False):
            torch.use_deterministic_algorithms(mode)
            run(q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, False]


def test_no_second_derivatives() -> None:
    q = torch.randn(1, 1, 20, 8, requires_grad=True)
    out = flexc.attention(q, q, q, backend="cpu")
    (grad,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="a gradient of a gradient"):
        grad.sum().backward()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_lengths_of_zero(lengths: tuple[int, int]) -> None:
    q = torch.randn(2, 4, lengths[0], 8, requires_grad=True)
    k, v = (torch.randn(2, 2, lengths[1], 8, requires_grad=True) for _ in range(2))
    sinks, slope = torch.randn(4, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    results = flexc.attention(
        q, k, v, sinks=sinks, score_mod=lambda s, b, h, i, j: s * slope, return_lse=True, backend="cpu"
    )
    grads = torch.autograd.grad(results, [q, k, v, sinks, slope], [torch.ones_like(x) for x in results])
    for grad, x in zip(grads, (q, k, v, sinks, slope), strict=True):
        assert grad.shape == x.shape
        assert grad.isfinite().all()
