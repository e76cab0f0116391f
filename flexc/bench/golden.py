"""The fp64 result of a sample, and how far a result is from it.

Rows of the output and of the gradient of q are independent of each other: a sample of rows with all keys
costs O(rows x length), not O(length squared). The gradients of k and v are those of one head, a band of rows
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexc.bench.cases import Case, Problem
from flexc.call import Mods
from flexc.frontend.value import Value
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.ops import Input
from flexc.resolve import resolve

ROWS = 64
_ROUND_OFF = 1e-6
_CHUNK = 1 << 26
"""Pairs evaluated at once when they are counted."""
_BAND = 1 << 24
"""Pairs of one head whose gradients are computed at once."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """`exact`, in fp64, is what `sample` takes of the results; `plain_errors` are those of plain PyTorch."""

    rows: torch.Tensor
    exact: tuple[torch.Tensor, ...]
    plain_errors: tuple[float, ...]

    @property
    def plain_error(self) -> float:
        """The largest of plain PyTorch."""
        return max(self.plain_errors)

    def sample(self, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Some rows of the output or of the gradient of q; those of k and v for one head."""
        first, *rest = results
        return (first[:, :, self.rows], *(x[-1:, -1:] for x in rest))

    def errors(self, results: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """The largest absolute difference in each result, inf where one is not finite."""
        return tuple(_distance(x, exact) for x, exact in zip(self.sample(results), self.exact, strict=True))

    def accepts(self, errors: Sequence[float]) -> bool:
        """The tolerance rule: at most twice the error of plain PyTorch in the same dtype, plus round-off."""
        return all(e <= 2 * plain + _ROUND_OFF for e, plain in zip(errors, self.plain_errors, strict=True))


def _distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    difference = float((x.double() - exact).abs().max())
    return difference if math.isfinite(difference) else math.inf


def make_golden(case: Case, problem: Problem, inputs: Inputs, *, backward: bool = False) -> Golden:
    """Computes the sample in fp64 and in the problem's own dtype.

    With `backward`, that of the gradients of q, k and v, where the gradient that comes in is q itself.
    """
    count = min(ROWS, problem.length)
    rows = torch.arange(count, device=problem.device) * (problem.length - 1) // max(count - 1, 1)
    mods, values, _ = resolve(case.score, case.mask)
    head = (problem.batch - 1, problem.heads - 1)

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        some = q[:, :, rows]
        if not backward:
            return (_attend(mods, values, _env(some, rows, k.shape[2], values), some, k, v),)
        leaf = some.detach().requires_grad_()
        with torch.enable_grad():
            out = _attend(mods, values, _env(some, rows, k.shape[2], values), leaf, k, v)
        (gradient,) = torch.autograd.grad(out, leaf, some)
        return gradient, *_gradients_of_one_head(mods, values, head, q[-1:, -1:], k[-1:, -1:], v[-1:, -1:])

    exact = compute(*(x.double() for x in inputs))
    plain = compute(*inputs)
    return Golden(rows, exact, tuple(_distance(x, e) for x, e in zip(plain, exact, strict=True)))


def _gradients_of_one_head(
    mods: Mods,
    values: tuple[Value, ...],
    head: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of k and v, (1, 1, S, D), in their dtype, from sums over bands of rows in fp32 or more.

    Without that last rounding, plain PyTorch could be twice as close to fp64 as any result of its dtype: the
    parts of many bands are small, and so are their roundings.
    """
    wide = _wide(q.dtype)
    leaves = (k.detach().requires_grad_(), v.detach().requires_grad_())
    sums = tuple(torch.zeros_like(x, dtype=wide) for x in leaves)
    step = max(1, _BAND // k.shape[2])
    for first in range(0, q.shape[2], step):
        band = q[:, :, first : first + step]
        rows = torch.arange(first, first + band.shape[2], device=q.device)
        with torch.enable_grad():
            env = _env(band, rows, k.shape[2], values, head)
            out = _attend(mods, values, env, band, *leaves)
        for total, part in zip(sums, torch.autograd.grad(out, leaves, band), strict=True):
            total += part
    return sums[0].to(k.dtype), sums[1].to(v.dtype)


def _attend(
    mods: Mods, values: tuple[Value, ...], env: Env, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    score = (q @ k.transpose(-1, -2)).to(_wide(q.dtype)) / math.sqrt(q.shape[3])
    if mods.score is not None:
        seen = Env(
            inputs={**env.inputs, Input.SCORE: score}, values=values, xp=torch, float_dtype=score.dtype
        )
        score = torch.as_tensor(evaluate(mods.score, seen)).to(score.dtype).expand_as(score)
    if mods.mask is not None:
        allowed = torch.as_tensor(evaluate(mods.mask, env), device=q.device)
        score = score.masked_fill(~allowed, -math.inf)
    weights = torch.softmax(score, dim=-1).nan_to_num(0.0)  # rows without a key: 0
    return weights.to(v.dtype) @ v


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _env(
    q: torch.Tensor,
    rows: torch.Tensor,
    kv_len: int,
    values: tuple[Value, ...],
    head: tuple[int, int] = (0, 0),
) -> Env:
    """Indices of rows (B, H, rows, D) of q, whose first batch and head have the numbers `head`."""

    def axis(numbers: torch.Tensor, dim: int) -> torch.Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = len(numbers)
        return numbers.view(shape)

    def count(n: int, first: int = 0) -> torch.Tensor:
        return torch.arange(first, first + n, device=q.device)

    inputs = {
        Input.B: axis(count(q.shape[0], head[0]), 0),
        Input.H: axis(count(q.shape[1], head[1]), 1),
        Input.Q_IDX: axis(rows, 2),
        Input.KV_IDX: axis(count(kv_len), 3),
    }
    return Env(inputs=inputs, values=values, xp=torch, float_dtype=torch.float32)


def share(case: Case, problem: Problem) -> float:
    """The fraction of all pairs that may attend, counted exactly."""
    mods, values, _ = resolve(case.score, case.mask)
    if mods.mask is None:
        return 1.0
    batch_and_heads = torch.empty(problem.batch, problem.heads, 0, 0, device=problem.device)
    step = max(1, _CHUNK // (problem.length * problem.batch * problem.heads))
    total = 0.0
    for first in range(0, problem.length, step):
        rows = torch.arange(first, min(first + step, problem.length), device=problem.device)
        allowed = torch.as_tensor(evaluate(mods.mask, _env(batch_and_heads, rows, problem.length, values)))
        total += float(allowed.double().mean()) * len(rows)
    return total / problem.length
