"""Attention under torch.func, batched gradients, and derivatives of kinds that kernels do not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import flexc

# PyTorch warns of itself when it first differentiates forward.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Tensors = tuple[torch.Tensor, ...]
SHAPE = (2, 2, 8, 4)


def _inputs(*, requires_grad: bool = False) -> Tensors:
    """q, k, v and a bias of heads and keys."""
    tensors = (*(torch.randn(SHAPE) for _ in range(3)), torch.randn(2, 8))
    return tuple(x.requires_grad_(requires_grad) for x in tensors)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, **given: Any) -> Any:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, kv_idx]

    return flexc.attention(q, k, v, mask_mod=flexc.masks.causal, score_mod=score, **given)


def _by_block_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
    blocks = flexc.create_block_mask(flexc.masks.causal, None, None, 8, 8, device="cpu")
    return flexc.attention(q, k, v, block_mask=blocks) + bias[0, :4]


def _with_dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return _attend(q, k, v, bias, dropout_p=0.5)


FORMS = [_attend, _by_block_mask, _with_dropout]


@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 3)])
def test_batched_gradients(attend: Callable[..., Any], wanted: tuple[int, ...]) -> None:
    inputs = _inputs(requires_grad=True)
    leaves = [inputs[n] for n in wanted]
    out = attend(*inputs)
    grads = torch.randn(3, *out.shape)
    found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for n, one in enumerate(grads):
        expected = torch.autograd.grad(out, leaves, one, retain_graph=True)
        torch.testing.assert_close([x[n] for x in found], list(expected))


def test_batched_gradients_of_the_lse() -> None:
    inputs = _inputs(requires_grad=True)
    out, lse = _attend(*inputs, return_lse=True)
    one, many = torch.randn_like(out), torch.randn(3, *lse.shape)
    found = torch.autograd.grad(lse, inputs[:2], many, is_grads_batched=True, retain_graph=True)
    for n, grad_lse in enumerate(many):
        expected = torch.autograd.grad(lse, inputs[:2], grad_lse, retain_graph=True)
        torch.testing.assert_close([x[n] for x in found], list(expected))
    both = (one.expand(3, *one.shape), many)
    found = torch.autograd.grad((out, lse), inputs, both, is_grads_batched=True, retain_graph=True)
    expected = torch.autograd.grad((out, lse), inputs, (one, many[1]))
    torch.testing.assert_close([x[1] for x in found], list(expected))


def test_a_jacobian_by_batched_gradients() -> None:
    q, *others = _inputs()
    found = torch.autograd.functional.jacobian(lambda q: _attend(q, *others), q, vectorize=True)
    torch.testing.assert_close(found, jacrev(lambda q: _attend(q, *others))(q))
    torch.testing.assert_close(found, jacrev(lambda q: _attend(q, *others, backend="reference"))(q))


def test_vmap_drops_the_same_pairs_for_all() -> None:
    q, k, v, bias = _inputs()
    many = q.expand(3, *q.shape)
    out = vmap(lambda q: _attend(q, k, v, bias, dropout_p=0.5), randomness="same")(many)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])

    def loss(q: torch.Tensor, bias: torch.Tensor) -> Any:
        return _attend(q, k, v, bias, dropout_p=0.5).pow(2).sum()

    torch.manual_seed(1)
    found = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None), randomness="same")(many, bias)
    torch.manual_seed(1)
    expected = grad(loss, argnums=(0, 1))(q, bias)
    torch.testing.assert_close([x[2] for x in found], list(expected))


def test_vmap_of_nothing() -> None:
    inputs = [torch.zeros(0, *x.shape) for x in _inputs()]
    for number, each in ((3, (0, 0, 0, None)), (4, (0, 0, 0, 0))):
        given = [*inputs[:number], *_inputs()[number:]]
        assert vmap(_attend, in_dims=each)(*given).shape == (0, *SHAPE)
        gradient = grad(lambda *x: _attend(*x).sum(), argnums=(0, 2))
        assert [x.shape for x in vmap(gradient, in_dims=each)(*given)] == [(0, *SHAPE)] * 2


NO_DIRECTION = "forward-mode derivatives"


@pytest.mark.parametrize("argument", range(4))
def test_forward_mode_is_refused(argument: int) -> None:
    inputs = _inputs()

    def attend(x: torch.Tensor) -> Any:
        given = list(inputs)
        given[argument] = x
        return _attend(*given)

    x = inputs[argument]
    with pytest.raises(flexc.FlexcError, match=NO_DIRECTION):
        jvp(attend, (x,), (x,))
    with pytest.raises(flexc.FlexcError, match=NO_DIRECTION):
        jacfwd(attend)(x)
    for needs in (False, True):
        with forward_ad.dual_level(), pytest.raises(flexc.FlexcError, match="reference"):
            attend(forward_ad.make_dual(x.clone().requires_grad_(needs), x))
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(flexc.FlexcError, match="vjp"):
        attend(forward_ad.make_dual(x, x))


def test_forward_mode_of_something_else() -> None:
    inputs = _inputs()
    with forward_ad.dual_level():
        forward_ad.make_dual(inputs[0], inputs[1])
        torch.testing.assert_close(_attend(*inputs), _attend(*inputs, backend="reference"))


def test_the_reference_has_every_derivative() -> None:
    q, k, v, bias = _inputs()
    wide = [x.double() for x in (q, k, v, bias)]

    def attend(q: torch.Tensor, bias: torch.Tensor) -> Any:
        return _attend(q, wide[1], wide[2], bias, backend="reference")

    point, direction = (wide[0], wide[3]), (torch.randn_like(wide[0]), torch.randn_like(wide[3]))
    tangent = jvp(attend, point, direction)[1]
    step = 1e-5
    above, below = (
        attend(*(x + s * d for x, d in zip(point, direction, strict=True))) for s in (step, -step)
    )
    torch.testing.assert_close(tangent, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, d) for x, d in zip(point, direction, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(attend(*duals)).tangent, tangent)
    torch.testing.assert_close(jacfwd(attend)(*point), jacrev(attend)(*point))
    curvature = hessian(lambda bias: attend(wide[0], bias).pow(2).sum())(wide[3])
    torch.testing.assert_close(
        curvature, jacrev(jacrev(lambda bias: attend(wide[0], bias).pow(2).sum()))(wide[3])
    )


def test_vmap_of_the_reference() -> None:
    q, k, v, _ = _inputs()
    biases, starts = torch.randn(3, 2, 8), torch.tensor([0, 3, 8])
    v[:, :, 5] = torch.nan

    def attend(bias: torch.Tensor, start: torch.Tensor, backend: str) -> Any:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx <= q_idx) & (kv_idx >= start)

        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * bias[h, kv_idx]

        return flexc.attention(q, k, v, mask_mod=mask, score_mod=score, backend=backend)

    for backend in ("reference", "cpu"):
        found = vmap(partial(attend, backend=backend))(biases, starts)
        for n in range(3):
            expected = attend(biases[n], starts[n], "reference")
            torch.testing.assert_close(found[n], expected, equal_nan=True)


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap"])
def test_transforms_under_torch_compile(transform: str) -> None:
    q, k, v, bias = _inputs()

    def run(q: torch.Tensor, bias: torch.Tensor) -> Any:
        def attend(q: torch.Tensor) -> Any:
            return _attend(q, k, v, bias)

        if transform == "grad":
            return grad(lambda q: attend(q).pow(2).sum())(q)
        return vjp(attend, q)[1](q)[0] if transform == "vjp" else vmap(attend)(torch.stack((q, 2 * q)))

    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, bias)
    torch.testing.assert_close(found, run(q, bias))
