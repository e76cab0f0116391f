"""`flexc::attention` in what PyTorch wraps around a model: checkpoints, transforms, copies, export."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.compiled_autograd import _enable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flexc
from flexc import statement
from flexc.ir.wire import from_wire, to_wire
from flexc.resolve import resolve


class Layer(torch.nn.Module):
    """Attention with a learned bias by distance, and a window."""

    def __init__(self, heads: int = 2, dim: int = 4, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.bias = torch.nn.Parameter(torch.randn(heads, 64))
        self.mask = flexc.masks.sliding_window(5)
        self.scoring = flexc.score_mod(self.score)
        self.dropout_p = dropout_p

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h, q_idx - kv_idx + 31]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = flexc.attention(
            q,
            k,
            v,
            mask_mod=self.mask,
            score_mod=self.score,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return out.transpose(1, 2).reshape(batch, length, width)


def _grads(layer: torch.nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.pow(2).sum(), list(layer.parameters())))


def _equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_backward_twice() -> None:
    layer, x = Layer(), torch.randn(2, 12, 8)
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    loss.backward()
    _equal([p.grad for p in layer.parameters() if p.grad is not None], first)
    assert len(first) == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpoint(reentrant: bool, dropout_p: float) -> None:
    layer, x = Layer(dropout_p=dropout_p), torch.randn(2, 12, 8, requires_grad=True)
    torch.manual_seed(1)
    out = layer(x)
    torch.manual_seed(1)
    again = checkpoint(layer, x, use_reentrant=reentrant)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(out, again)
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(out.pow(2).sum(), wanted)
    again.pow(2).sum().backward()
    _equal([w.grad for w in wanted if w.grad is not None], list(expected))


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator of flexc runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flexc":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoint(saved: bool) -> None:
    layer, x = Layer(), torch.randn(2, 12, 8)
    expected = _grads(layer, layer(x))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = saved and op is torch.ops.flexc.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(
        layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    assert isinstance(out, torch.Tensor)
    with Counting() as counted:
        _equal(_grads(layer, out), expected)
    again = [] if saved else ["attention.default"]
    assert counted.names == [*again, "attention_backward.default"]


def test_calls_that_nobody_watches_do_not_dispatch() -> None:
    q = torch.randn(1, 2, 9, 4)
    with torch.no_grad(), Counting() as counted:
        flexc.attention(q, q, q)
    assert counted.names == ["attention.default"]
    assert not flexc.attention(q, q, q).requires_grad


def test_opcheck() -> None:
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 30, requires_grad=True)
    mods, values, _ = resolve(
        lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + 9], flexc.masks.sliding_window(4)
    )
    text = statement.text_of(statement.Statement(mods.score, mods.mask, mods.captures, backend="cpu"), mods)
    given: tuple[Any, ...] = (*statement.split_values(mods.captures, values), [], 0.5, text)
    torch.library.opcheck(torch.ops.flexc.attention.default, (q, k, v, None, None, *given))


def test_autocast() -> None:
    layer, x = Layer(), torch.randn(2, 12, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    grads = _grads(layer, out.float())
    for grad, expected in zip(grads, _grads(layer, layer(x)), strict=True):
        assert grad.dtype is torch.float32
        torch.testing.assert_close(grad, expected, rtol=0.1, atol=0.2 * float(expected.abs().max()))


def test_autocast_leaves_fp64_alone() -> None:
    q = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flexc.attention(q, q, q)
    assert out.dtype is torch.float64
    assert torch.equal(out, flexc.attention(q, q, q))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compiled_autograd(dropout_p: float) -> None:
    """The backward of a model that is not compiled, compiled as one graph."""
    layer, x = Layer(dropout_p=dropout_p), torch.randn(2, 12, 8)
    torch.manual_seed(1)
    expected = _grads(layer, layer(x))
    torch.manual_seed(1)
    torch.compiler.reset()
    with _enable(torch.compile(backend="aot_eager", fullgraph=True)):
        layer(x).pow(2).sum().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_copies_and_pickles_of_models() -> None:
    layer, x = Layer(), torch.randn(2, 12, 8)
    expected = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), expected)
        assert twin.bias is not layer.bias
        assert twin.mask.explain(9, 9) == layer.mask.explain(9, 9)
        with torch.no_grad():
            twin.bias.add_(torch.randn_like(twin.bias))
        assert not torch.equal(twin(x), expected)
        assert torch.equal(layer(x), expected)


def test_copied_mods_read_the_tensors_of_the_copy() -> None:
    table = torch.nn.Parameter(torch.randn(2, 9))
    model = torch.nn.ParameterDict({"table": table})
    twin, score = copy.deepcopy((model, flexc.scores.relative_bias(table)))
    assert any(value is twin["table"] for value in score.trace().values)
    assert isinstance(pickle.loads(pickle.dumps(score)), flexc.ScoreMod)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    layer, x = Layer().eval(), torch.randn(2, 12, 8)
    lengths = {1: torch.export.Dim("length", min=2, max=30)}
    program = torch.export.export(layer, (x,), dynamic_shapes=(lengths,), strict=strict)
    assert [n.target for n in program.graph.nodes if "flexc" in str(n.target)] == [
        torch.ops.flexc.attention.default
    ]
    for length in (12, 20):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_another_process_runs_an_exported_program(tmp_path: Path) -> None:
    layer, x = Layer().eval(), torch.randn(2, 12, 8)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "program.pt2")
    torch.save((x, layer(x).detach()), tmp_path / "expected.pt")
    code = (
        "import sys, torch, flexc.operators\n"
        "x, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "out = torch.export.load(sys.argv[1] + '/program.pt2').module()(x)\n"
        "torch.testing.assert_close(out, expected)\n"
        "print('equal')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_an_aotinductor_package_of_an_exported_program(tmp_path: Path) -> None:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    layer, x = Layer().eval(), torch.randn(2, 12, 8)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        path = aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        torch.testing.assert_close(aoti_load_package(path)(x), layer(x))


def test_func_grad() -> None:
    layer, x = Layer(), torch.randn(2, 12, 8)
    parameters: dict[str, torch.Tensor] = dict(layer.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(layer, parameters, (x,)).pow(2).sum()

    found = torch.func.grad(loss)(parameters)
    _equal([found[name] for name in parameters], _grads(layer, layer(x)))


@pytest.mark.parametrize("reads_batch", [False, True])
def test_vmap(reads_batch: bool) -> None:
    q, k, v = (torch.randn(3, 2, 2, 9, 4) for _ in range(3))
    lengths = torch.tensor([9, 5])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            allowed = q_idx >= kv_idx
            return allowed & (kv_idx < lengths[b]) if reads_batch else allowed

        return flexc.attention(q, k, v, mask_mod=mask)

    expected = torch.stack([attend(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v), expected)
    shared = torch.func.vmap(attend, in_dims=(1, None, None), out_dims=1)(q.transpose(0, 1), k[0], v[0])
    torch.testing.assert_close(shared[:, 1], attend(q[1], k[0], v[0]))


def test_gradients_by_example() -> None:
    q, k, v = (torch.randn(3, 1, 2, 9, 4) for _ in range(3))
    bias = torch.randn(2, 9)

    def loss(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[h, kv_idx]

        return flexc.attention(q, k, v, score_mod=score).pow(2).sum()

    for wanted in ((0, 1, 2, 3), (1, 3)):
        gradient = torch.func.grad(loss, argnums=wanted)
        found = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0))(bias, q, k, v)
        for i in range(3):
            expected = gradient(bias, q[i], k[i], v[i])
            for actual, one in zip(found, expected, strict=True):
                torch.testing.assert_close(actual[i], one)


def test_a_second_derivative_is_refused() -> None:
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(flexc.attention(q, q, q).pow(2).sum(), q, create_graph=True)
    with pytest.raises(flexc.FlexcError, match="gradient of a gradient"):
        grad.sum().backward()


def test_a_text_holds_all_of_the_graphs() -> None:
    table = torch.zeros(3)
    mods, _, _ = resolve(
        lambda score, b, h, q_idx, kv_idx: torch.where(score > -0.0, table[h % 3] * 0.1, float("inf")),
        flexc.masks.sliding_window(5) & flexc.masks.chunked(7),
    )
    text = to_wire((mods.score, mods.mask, None), mods.captures, {"a": 1})
    roots, captures, facts = from_wire(text)
    assert roots == (mods.score, mods.mask, None)
    assert roots[0] is mods.score
    assert (captures, facts) == (mods.captures, {"a": 1})
    with pytest.raises(flexc.InternalError, match="no text of graphs"):
        from_wire(text[:-1])


def test_new_closures_leave_nothing_behind() -> None:
    q = torch.randn(1, 2, 9, 4, requires_grad=True)

    def step(width: int) -> None:
        bias = torch.randn(2, requires_grad=True)

        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[h]

        flexc.attention(q, q, q, score_mod=score, mask_mod=flexc.masks.sliding_window(width)).sum().backward()

    step(1)
    before = len(statement._texts), len(statement._read)
    for width in range(2, 6):
        step(width)
    assert (len(statement._texts), len(statement._read)) == before
