"""Training on a GPU: in CUDA graphs, under torch.compile, with checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexc
from tests.runtime.test_operator import Layer

STEPS = 4


def _model(dropout_p: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(2, 64, dropout_p), Layer(2, 64, dropout_p)).cuda()


def _batch() -> torch.Tensor:
    return torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(1)).cuda()


def _parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


def test_a_training_step_in_a_cuda_graph() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    plain, graphed, x = _model(), _model(), _batch()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, graphed)]
    for model, optimizer in zip((plain, graphed), optimizers, strict=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(model, optimizer, x)
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(graphed, optimizers[1], x)
    for number in range(STEPS):
        x.copy_(torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(number)))
        graph.replay()
        torch.testing.assert_close(loss, step(plain, optimizers[0], x))
    for actual, expected in zip(_parameters(graphed), _parameters(plain), strict=True):
        torch.testing.assert_close(actual, expected)


def test_dropout_in_a_cuda_graph_is_drawn_anew() -> None:
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    flexc.attention(q, q, q, dropout_p=0.5).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexc.attention(q, q, q, dropout_p=0.5)
        (grad,) = torch.autograd.grad(out.float().pow(2).sum(), q)
    results = []
    for _ in range(2):
        graph.replay()
        results.append((out.clone(), grad.clone()))
    assert not torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])
    assert all(x.isfinite().all() for pair in results for x in pair)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_training(mode: str) -> None:
    torch.compiler.reset()
    plain, x = _model(), _batch()
    compiled = torch.compile(plain, fullgraph=True, mode=mode)
    for _ in range(STEPS):
        expected = torch.autograd.grad(plain(x).pow(2).mean(), list(plain.parameters()))
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(x).pow(2).mean()
        found = torch.autograd.grad(loss, list(plain.parameters()))
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_pairs_again(reentrant: bool) -> None:
    model, x = _model(dropout_p=0.3), _batch().requires_grad_()
    grads: list[Any] = []
    for through in (lambda x: model(x), lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        model.zero_grad()
        x.grad = None
        through(x).pow(2).mean().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_step_that_repeats_another_has_its_gradients(backend: str) -> None:
    """The second one is prepared, forward and backward, and lies elsewhere in memory."""
    ids = torch.arange(300, device="cuda") // 70
    bias = torch.randn(4, 700, device="cuda", requires_grad=True)
    mask = flexc.masks.document(ids) & flexc.masks.causal
    score = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s + bias[h, q_idx - kv_idx + 300])
    held = []
    for kind in ("first", "again", "again", "written", "again"):
        if kind == "written":
            ids[100:] += 1
        x = [torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.float16) for _ in range(4)]
        q, k, v, grad = (y.transpose(1, 2) for y in x)
        wanted = [y.requires_grad_() for y in (q, k, v)] + [bias]
        results = []
        for name in (backend, "reference"):
            out = flexc.attention(q, k, v, mask_mod=mask, score_mod=score, backend=name)
            results.append([out, *torch.autograd.grad(out, wanted, grad)])
        held.append(results)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("kind", ["closure", "sinks", "number of the host", "one tensor, then three"])
def test_calls_that_repeat_others_with_other_tensors(kind: str, backend: str) -> None:
    """Only addresses differ: of captured tensors, of copies of sinks and numbers, of q, k and v."""
    held = []
    for n in range(4):
        shape = (2, 300, 4, 64)
        x = [torch.randn(shape, device="cuda", dtype=torch.float16).transpose(1, 2) for _ in range(4)]
        q, k, v, grad = (y.requires_grad_() for y in x)
        wanted, given = [q, k, v], dict[str, Any]()
        if kind == "one tensor, then three" and not n:
            q, k, wanted = v, v, [v]
        if kind == "closure":
            bias = torch.randn(4, 700, device="cuda", requires_grad=True)
            given["score_mod"] = lambda s, b, h, q_idx, kv_idx, bias=bias: s + bias[h, q_idx - kv_idx + 300]
            wanted.append(bias)
        if kind == "sinks":
            given["sinks"] = torch.randn(4, device="cuda", dtype=torch.float16, requires_grad=True)
            wanted.append(given["sinks"])
        if kind == "number of the host":
            number = torch.tensor(0.5 + n // 2, requires_grad=True)
            given["score_mod"] = lambda s, b, h, q_idx, kv_idx, number=number: s * number
            wanted.append(number)
        results = []
        for name in (backend, "reference"):
            out = flexc.attention(q, k, v, mask_mod=flexc.masks.causal, backend=name, **given)
            results.append([out, *torch.autograd.grad(out, wanted, grad.detach())])
        held.append(results)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_dropout_that_is_repeated_drops_the_pairs_of_its_seed(backend: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "requires_grad": True}
    q, k, v = (torch.randn(1, 2, 256, 64, **options) for _ in range(3))
    found: dict[int, list[list[torch.Tensor]]] = {}
    for seed in (1, 2, 1, 2):
        torch.manual_seed(seed)
        out = flexc.attention(q, k, v, mask_mod=flexc.masks.causal, dropout_p=0.3, backend=backend)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        found.setdefault(seed, []).append([out, *grads])
    for first, second in found.values():
        torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)
    assert not torch.equal(found[1][0][0], found[2][0][0])


def test_batched_gradients() -> None:
    """Autograd computes them in a thread of the device's own."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "requires_grad": True}
    q, k, v = (torch.randn(1, 2, 130, 64, **options) for _ in range(3))
    grads = torch.randn(3, *q.shape, device="cuda", dtype=torch.float16)
    for _ in range(2):
        out = flexc.attention(q, k, v, mask_mod=flexc.masks.causal)
        found = torch.autograd.grad(out, (q, k, v), grads, is_grads_batched=True, retain_graph=True)
        for n, grad in enumerate(grads):
            expected = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
            torch.testing.assert_close([x[n] for x in found], list(expected), rtol=2e-2, atol=2e-2)
