"""The one tolerance rule of the numeric tests.

A result may be at most twice as far from the fp64 golden as what plain PyTorch computes in the same dtype,
plus one unit in the last place of the largest golden value, plus the golden's own round-off. Gradients go by
the same rule; those of sinks and of 0-dim tensors, which are few numbers, are also allowed the rounding of
the terms that they are the sums of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch

from flexc.call import AttentionCall
from flexc.reference import dense
from flexc.resolve import resolve

# Sums of fp64 numbers near 1 in another order; it counts only where the result is fp64 as well.
_GOLDEN_ROUND_OFF = 2.0**-45


class _Arguments(TypedDict, total=False):
    """What a golden takes besides tensors, as `flexc.attention` does; the seed of dropout is given."""

    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | None
    block_mask: Any
    scale: float | None
    dropout_p: float
    dropout_seed: int


@dataclass(frozen=True, slots=True)
class Golden:
    """What a call should give (fp64), and what plain PyTorch gives in the dtype of its inputs."""

    out: torch.Tensor
    lse: torch.Tensor
    plain_out: torch.Tensor
    plain_lse: torch.Tensor

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Fails when `out` (or `lse`) breaks the rule."""
        assert_close_to_golden(out, self.out, self.plain_out)
        if lse is not None:
            assert_close_to_golden(lse, self.lse, self.plain_lse)


@dataclass(frozen=True, slots=True)
class GoldenGradients:
    """What the gradients of a call should be (fp64), and what plain PyTorch gives in its inputs' dtypes.

    In the order of q, k, v, the sinks if there are any, and the captured tensors that were named. `round_off`
    is that of the terms of a sum in 32 bits, for sinks and 0-dim tensors: a few numbers can come out of plain
    PyTorch right by luck.
    """

    names: tuple[str, ...]
    golden: tuple[torch.Tensor, ...]
    plain: tuple[torch.Tensor, ...]
    round_off: tuple[float, ...]

    def check(self, actual: Sequence[torch.Tensor | None]) -> None:
        """Fails when a gradient breaks the rule, or is missing."""
        each = zip(self.names, actual, self.golden, self.plain, self.round_off, strict=True)
        for name, one, golden, plain, round_off in each:
            assert one is not None, name
            assert one.dtype is plain.dtype, f"{name}: {one.dtype}"
            what = f"gradient of {name}: "
            assert_close_to_golden(one, golden, plain, what=what, round_off=round_off)


def golden(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    **arguments: Unpack[_Arguments],
) -> Golden:
    """The golden of `flexc.attention` with these arguments, on the device of the tensors."""
    sinks = None if sinks is None else sinks.detach()
    with torch.no_grad():
        out, lse = dense(
            _call(q.detach().double(), k.detach().double(), v.detach().double(), sinks, {}, **arguments)
        )
        plain = _call(q.detach(), k.detach(), v.detach(), sinks, {}, **arguments)
        plain_out, plain_lse = dense(plain, product=q.dtype)
    return Golden(out, lse, plain_out, plain_lse)


def golden_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    captured: Sequence[torch.Tensor] = (),
    **arguments: Unpack[_Arguments],
) -> GoldenGradients:
    """The golden gradients of `flexc.attention`, by autograd, for these gradients of its results.

    `arguments` are those of `golden`. `captured` are tensors that the score_mod captured.
    """
    tensors = [q, k, v, *(() if sinks is None else (sinks,)), *captured]
    fixed = 3 if sinks is None else 4
    pairs = (*k.shape[:2], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])

    def gradients(wide: bool) -> list[torch.Tensor]:
        leaves = [(x.detach().double() if wide else x.detach().clone()) for x in tensors]
        if wide:  # a 0-dim tensor for every pair: the terms of its gradient
            leaves = [x.expand(pairs).clone() if x.dim() == 0 else x for x in leaves]
        leaves = [x.requires_grad_() for x in leaves]
        replaced = {id(x): leaf for x, leaf in zip(captured, leaves[fixed:], strict=True)}
        call = _call(
            leaves[0], leaves[1], leaves[2], None if sinks is None else leaves[3], replaced, **arguments
        )
        out, lse = dense(call) if wide else dense(call, product=q.dtype)
        results, grads = [out], [grad_out.to(out.dtype)]
        if grad_lse is not None:
            results, grads = [out, lse], [*grads, grad_lse.to(lse.dtype)]
        found = torch.autograd.grad(results, leaves, grads, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]

    names = [*("q", "k", "v", "sinks")[:fixed], *(f"captured {n}" for n in range(len(captured)))]
    terms = gradients(True)
    eps = 4 * torch.finfo(torch.float64 if q.dtype is torch.float64 else torch.float32).eps
    numbers = [x.dim() == 0 for x in tensors]
    round_off = [eps * float(g.norm()) * single for g, single in zip(terms, numbers, strict=True)]
    if sinks is not None:
        exact = golden(q, k, v, sinks=sinks, **arguments)
        weights = (sinks.detach().double().view(1, -1, 1) - exact.lse).exp()
        each = weights * (grad_out * exact.out).abs().sum(-1)
        round_off[3] = eps * float(each.norm(dim=(0, 2)).max())
    return GoldenGradients(
        names=tuple(names),
        golden=tuple(g.sum() if single else g for g, single in zip(terms, numbers, strict=True)),
        plain=tuple(gradients(False)),
        round_off=tuple(round_off),
    )


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    replaced: Mapping[int, torch.Tensor],
    **arguments: Unpack[_Arguments],
) -> AttentionCall:
    """A call of the dense reference; captured tensors are replaced by their identity."""
    scale = arguments.get("scale")
    mods, values, block_map = resolve(
        arguments.get("score_mod"), arguments.get("mask_mod"), arguments.get("block_mask")
    )
    return AttentionCall(
        q=q,
        k=k,
        v=v,
        mods=mods,
        values=tuple(replaced.get(id(x), x) for x in values),
        block_map=block_map,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
        sinks=sinks,
        return_lse=True,
        out=None,
        allow_tf32=False,
        dropout_p=arguments.get("dropout_p", 0.0),
        dropout_seed=arguments.get("dropout_seed", 0),
    )


def assert_close_to_golden(
    actual: torch.Tensor,
    golden: torch.Tensor,
    plain: torch.Tensor,
    *,
    what: str = "",
    round_off: float = 0.0,
) -> None:
    """Fails when `actual` is more than twice as far from `golden` as `plain` is, plus round-off.

    `round_off` is what is known of it beside that of the result itself.
    """
    assert actual.shape == golden.shape, f"{what}shape {tuple(actual.shape)}, expected {tuple(golden.shape)}"
    wide = actual.detach().double()
    finite = golden.isfinite()
    wrong = ~torch.where(finite, wide.isfinite(), (wide == golden) | (wide.isnan() & golden.isnan()))
    assert not wrong.any(), (
        f"{what}{int(wrong.sum())} values are not what they should be; first at {_first(wrong)}"
    )
    error = _error(wide, golden, finite)
    largest = float(golden[finite].abs().max()) if finite.any() else 0.0
    allowed = 2 * _error(plain.double(), golden, finite) + torch.finfo(actual.dtype).eps * largest
    allowed += _GOLDEN_ROUND_OFF * max(largest, 1.0) + round_off
    assert error <= allowed, f"{what}error {error:.3g}, allowed {allowed:.3g}"


def _error(x: torch.Tensor, golden: torch.Tensor, finite: torch.Tensor) -> float:
    differences = (x - golden)[finite].abs()
    return float(differences.max()) if differences.numel() else 0.0


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])
