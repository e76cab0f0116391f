"""flexc under torch.compile: one operator in one graph, whatever the mods are made of."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flexc

# The compiler's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counted:
    """A function compiled as one graph, and how often it was compiled."""

    def __init__(self, function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._compiled = torch.compile(function, backend=self._counter, fullgraph=True, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @property
    def count(self) -> int:
        return int(self._counter.frame_count)


def _qkv(q_len: int, kv_len: int | None = None, **options: Any) -> tuple[torch.Tensor, ...]:
    kv_len = q_len if kv_len is None else kv_len
    q = torch.randn(2, 4, q_len, 8, **options)
    return q, torch.randn(2, 2, kv_len, 8, **options), torch.randn(2, 2, kv_len, 6, **options)


def _inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, width: int) -> Any:
    """Mods made where they are used, over tensors and numbers of the graph."""
    doubled = 2 * slopes

    def score(score, b, h, q_idx, kv_idx):
        return score + doubled[h] * (kv_idx - q_idx)

    out, lse = flexc.attention(
        q,
        k,
        v,
        score_mod=score,
        mask_mod=lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < width,
        return_lse=True,
    )
    return 2 * out, lse


def _outside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    return flexc.attention(q, k, v, mask_mod=mask & flexc.masks.causal)


def _documents(ids: torch.Tensor, sort: int) -> flexc.MaskMod:
    """A new closure at each call."""
    return flexc.mask_mod(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) | (ids[q_idx] == sort))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_mods_made_in_a_compiled_function(backend: str) -> None:
    compiled = Counted(_inside, backend)
    for width, length in ((3, 20), (4, 21), (5, 33)):
        args: tuple[Any, ...] = (*_qkv(length), torch.randn(4), width)
        for actual, expected in zip(compiled(*args), _inside(*args), strict=True):
            torch.testing.assert_close(actual, expected)
    assert compiled.count == 2  # for the first numbers, and for any


def test_new_closures_do_not_compile_again() -> None:
    compiled = Counted(_outside)
    q, k, v = _qkv(24)
    for step in range(5):
        mask = _documents(torch.randint(0, 3, (24,), dtype=torch.int32), 1)
        assert torch.equal(compiled(q, k, v, mask), _outside(q, k, v, mask)), step
    assert compiled.count == 1


def test_lengths_do_not_compile_again() -> None:
    compiled = Counted(_outside, dynamic=True)
    compiled(*_qkv(7, 9), _documents(torch.zeros(9, dtype=torch.int32), 1))
    once = compiled.count  # torch.compile may have started over
    for q_len in (24, 25, 31, 64, 130):
        q, k, v = _qkv(q_len, q_len + 3)
        mask = _documents(torch.randint(0, 3, (q_len + 3,), dtype=torch.int32), 1)
        assert torch.equal(compiled(q, k, v, mask), _outside(q, k, v, mask))
    assert compiled.count == once


@pytest.mark.parametrize("theirs", [False, True], ids=["flexc", "pytorch"])
def test_block_masks(theirs: bool) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> Any:
        return flexc.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled = Counted(function)
    for q_len in (300, 400, 500):
        q, k, v = _qkv(q_len)
        mask: Any = flexc.create_block_mask(flexc.masks.sliding_window(9), None, None, q_len, q_len, "cpu")
        mask = mask.to_torch() if theirs else mask
        assert torch.equal(compiled(q, k, v, mask), function(q, k, v, mask))
    assert compiled.count == 2


def test_a_block_mask_hides_what_it_does_not_list() -> None:
    lists = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = flexc.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)
    q, k, v = _qkv(32)
    out = Counted(lambda q, k, v: flexc.attention(q, k, v, block_mask=mask))(q, k, v)
    first = flexc.attention(q[:, :, :16], k[:, :, :16], v[:, :, :16])
    torch.testing.assert_close(out[:, :, :16], first)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients(backend: str) -> None:
    def function(q: Any, k: Any, v: Any, slopes: torch.Tensor, table: torch.Tensor, sinks: Any) -> Any:
        def score(score, b, h, q_idx, kv_idx):
            return score * (1 + slopes[h]) + table.exp()[q_idx % 3, kv_idx % 2]

        return flexc.attention(q, k, v, score_mod=score, sinks=sinks, backend="reference", return_lse=True)

    inputs = [*_qkv(7, 9), torch.randn(4), torch.randn(3, 2), torch.randn(4)]
    inputs = [x.requires_grad_() for x in inputs]
    results = []
    for call in (Counted(function, backend), function):
        out, lse = call(*inputs)
        (out.pow(2).sum() + lse.sin().sum()).backward()
        results.append([out, lse, *(x.grad for x in inputs)])
        for x in inputs:
            x.grad = None
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_no_gradient_goes_through_what_a_mod_detaches() -> None:
    slopes = torch.randn(4, requires_grad=True)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        with torch.no_grad():
            factor = slopes[h] * 2
        return s * factor + slopes.detach()[h] * s + slopes[h] * torch.tanh(s.detach())

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flexc.attention(q, k, v, score_mod=score)

    inputs = [x.requires_grad_() for x in _qkv(17)]
    found = [torch.autograd.grad(f(*inputs).square().sum(), [*inputs, slopes]) for f in (Counted(call), call)]
    torch.testing.assert_close(found[0], found[1])


def test_parameters_of_a_module() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(4, 99))

        def score(self, score, b, h, q_idx, kv_idx):
            return score + self.bias[h, q_idx - kv_idx + 49]

        def forward(self, q, k, v):
            return flexc.attention(q, k, v, score_mod=self.score, backend="reference")

    layer = Layer()
    q, k, v = _qkv(24)
    compiled = Counted(layer)
    compiled(q, k, v).sum().backward()
    assert layer.bias.grad is not None
    actual, layer.bias.grad = layer.bias.grad, None
    layer(q, k, v).sum().backward()
    torch.testing.assert_close(actual, layer.bias.grad)


def test_captured_views_of_one_tensor() -> None:
    def function(q: Any, k: Any, v: Any, bounds: torch.Tensor) -> Any:
        first, last = bounds[:-1], bounds[1:]
        return flexc.attention(
            q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (first[q_idx] <= kv_idx) & (kv_idx < last[q_idx])
        )

    q, k, v = torch.randn(3, 1, 2, 24, 8)  # views of one tensor as well
    bounds = torch.arange(25)
    assert torch.equal(Counted(function)(q, k, v, bounds), function(q, k, v, bounds))


def test_nested_reads_and_reductions() -> None:
    def function(q: Any, k: Any, v: Any, order: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
        def score(score, b, h, q_idx, kv_idx):
            return score + (left[b, h, order[q_idx]] * right[b, h // 2, kv_idx, :]).sum(-1)

        return flexc.attention(q, k, v, score_mod=score)

    q, k, v = _qkv(12)
    args = (q, k, v, torch.randperm(12), torch.randn(2, 4, 12, 3), torch.randn(2, 2, 12, 3))
    torch.testing.assert_close(Counted(function)(*args), function(*args))


def test_autocast() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flexc.attention(q, k, v, mask_mod=flexc.masks.causal)

    q, k, v = _qkv(20)
    out = Counted(function)(q, k, v)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, function(q, k, v))


def test_out() -> None:
    def function(q: Any, k: Any, v: Any, out: torch.Tensor) -> Any:
        return flexc.attention(q, k, v, out=out)

    q, k, v = _qkv(20)
    out = torch.empty(2, 4, 20, 6)
    Counted(function)(q, k, v, out)
    assert torch.equal(out, flexc.attention(q, k, v))


def test_a_mistake_in_a_mod_shows_the_line() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return flexc.attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score.erfinv())

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"erfinv.*\n.*test_torch_compile"):
        Counted(function)(*_qkv(20))


def test_a_mistake_in_a_mod_shows_the_columns() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        def score(score, b, h, q_idx, kv_idx):
            return score * 2 + score.erfinv() - 1

        return flexc.attention(q, k, v, score_mod=score)

    def first_mistake(q: Any, k: Any, v: Any) -> Any:
        return flexc.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).erfinv() > 0)

    def twice(q: Any, k: Any, v: Any) -> Any:
        return flexc.attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s.erfinv() + h.erfinv())

    line = "return flexc.attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s.erfinv() + h.erfinv())"
    mistakes = ((function, "score.erfinv()"), (first_mistake, "(q_idx - kv_idx).erfinv()"), (twice, line))
    for wrong, shown in mistakes:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            Counted(wrong)(*_qkv(20))
        error = caught.value.inner_exception
        assert isinstance(error, flexc.FlexcError)
        span = error.span
        assert span is not None
        assert linecache.getline(span.file, span.line)[span.column : span.end_column] == shown


def test_mistakes_in_tensors_are_found_when_compiling() -> None:
    q, k, _ = _qkv(20)
    with pytest.raises(Exception, match="k and v need the same"):
        Counted(lambda q, k, v: flexc.attention(q, k, v))(q, k, torch.randn(2, 2, 21, 6))
    mask = flexc.create_block_mask(flexc.masks.causal, None, None, 30, 30, "cpu")
    with pytest.raises(Exception, match="the block mask was made for lengths"):
        Counted(lambda q, k, v: flexc.attention(q, k, v, block_mask=mask))(q, k, k)


def test_without_fullgraph_what_cannot_be_traced_runs_between_the_graphs() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
        return 2 * flexc.attention(
            q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < int(width.item())
        )

    q, k, v = _qkv(20)
    with pytest.raises(flexc.FlexcError, match="item"):
        function(q, k, v, torch.tensor(3))
    with pytest.raises(flexc.FlexcError, match="item"):
        torch.compile(function, backend="eager")(q, k, v, torch.tensor(3))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_block_mask_made_in_a_compiled_function(backend: str) -> None:
    def function(q: Any, k: Any, v: Any, ids: torch.Tensor, width: int) -> Any:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (ids[q_idx] == ids[kv_idx]) & (q_idx - kv_idx < width)

        lengths = q.shape[2], k.shape[2]
        blocks = flexc.create_block_mask(flexc.masks.causal & mask, None, None, *lengths, device=q.device)
        other = flexc.masks.causal.block_mask(None, None, *lengths, device="cpu", BLOCK_SIZE=(16, 32))
        first = flexc.attention(q, k, v, block_mask=blocks)
        return flexc.attention(q + first.mean(), k, v, block_mask=blocks, mask_mod=other.mask_mod)

    compiled = Counted(function, backend)
    for length in (40, 50, 60):
        q, k, v = (x.requires_grad_() for x in _qkv(length))
        given = (q, k, v, torch.arange(length) // 11, length // 5)
        results = [call(*given) for call in (compiled, function)]
        grads = [torch.autograd.grad(result.pow(2).sum(), (q, k, v)) for result in results]
        for ours, theirs in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert compiled.count == 2


def test_a_block_mask_that_leaves_a_compiled_function() -> None:
    def function(q: torch.Tensor) -> Any:
        return flexc.create_block_mask(flexc.masks.causal, 2, None, q.shape[2], 300, "cpu", BLOCK_SIZE=64), q

    q, k, v = _qkv(280, 300)
    made, _ = Counted(function)(q)
    expected, _ = function(q)
    assert made.shape == expected.shape
    assert torch.equal(made.kv_indices, expected.kv_indices)
    assert torch.equal(made.to_dense(), expected.to_dense())
    assert made.sparsity() == expected.sparsity()
    out = flexc.attention(q, k, v, block_mask=expected)
    for mask in (made, made.to("cpu"), function(q)[0]):
        assert torch.equal(flexc.attention(q, k, v, block_mask=mask), out)
        assert torch.equal(Counted(lambda q, m: flexc.attention(q, k, v, block_mask=m))(q, mask), out)


def test_the_blocks_of_a_mask_are_found_between_graphs() -> None:
    def function(q: torch.Tensor) -> torch.Tensor:
        blocks = flexc.create_block_mask(flexc.masks.causal, None, None, 300, 300, device="cpu")
        return q * blocks.kv_num_blocks.sum()

    q, _, _ = _qkv(20)
    assert torch.equal(torch.compile(function, backend="eager")(q), function(q))
    with pytest.raises(Exception, match="found between graphs"):
        Counted(function)(q)


def test_a_compiled_block_mask() -> None:
    compiled = torch.compile(flexc.create_block_mask, backend="eager")
    mask = compiled(flexc.masks.causal, None, None, 300, 300, device="cpu")
    assert mask.shape == (1, 1, 300, 300)


def test_dropout() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return flexc.attention(q, k, v, dropout_p=0.4)

    q, k, v = (x.requires_grad_() for x in _qkv(12))
    compiled = Counted(function)
    results: list[list[torch.Tensor]] = []
    for call in (compiled, compiled, function):
        if call is function or not results:
            torch.manual_seed(3)
        out = call(q, k, v)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v))])
    assert not torch.equal(results[0][0], results[1][0])
    for actual, expected in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_checkpoint_in_a_compiled_function() -> None:
    def attend(q: Any, k: Any, v: Any, bias: torch.Tensor) -> Any:
        def score(score, b, h, q_idx, kv_idx):
            return score + bias[h, kv_idx]

        return flexc.attention(q, k, v, score_mod=score, dropout_p=0.2)

    def function(*args: Any) -> Any:
        return checkpoint(attend, *args, use_reentrant=False)

    inputs = [x.requires_grad_() for x in (*_qkv(12), torch.randn(4, 12))]
    results = []
    for call in (Counted(function), attend):
        torch.manual_seed(3)
        out = call(*inputs)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
