"""The fp64 result of a sample of query rows, and how far a result is from it.

Rows are independent of each other: a sample with all keys costs O(rows x length), not O(length squared).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flexc.bench.cases import Case, Problem
from flexc.call import Mods
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.ops import Input
from flexc.resolve import resolve

ROWS = 64
_ROUND_OFF = 1e-6
_CHUNK = 1 << 26
"""Pairs evaluated at once when they are counted."""

Values = tuple[torch.Tensor | int | float | bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """`out` (B, H, rows, D) in fp64 for the query indices `rows`; `plain_error` is that of plain PyTorch."""

    rows: torch.Tensor
    out: torch.Tensor
    plain_error: float

    def error(self, out: torch.Tensor) -> float:
        """The largest absolute difference in the sampled rows of a full result (B, H, L, D)."""
        difference = (out[:, :, self.rows].double() - self.out).abs().max()
        return float(difference) if math.isfinite(float(difference)) else math.inf

    def accepts(self, error: float) -> bool:
        """The tolerance rule: at most twice the error of plain PyTorch in the same dtype, plus round-off."""
        return error <= 2 * self.plain_error + _ROUND_OFF


def make_golden(
    case: Case,
    problem: Problem,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    backward: bool = False,
) -> Golden:
    """Computes the sampled rows in fp64 and in the problem's own dtype.

    With `backward`, those of the gradient of q, where the gradient that comes in is q itself.
    """
    count = min(ROWS, problem.length)
    rows = torch.arange(count, device=problem.device) * (problem.length - 1) // max(count - 1, 1)
    mods, values, _ = resolve(case.score, case.mask)
    q, k, v = inputs
    q = q[:, :, rows]
    compute = _gradient_of_q if backward else _attend
    exact = compute(mods, values, rows, q.double(), k.double(), v.double())
    plain = compute(mods, values, rows, q, k, v)
    return Golden(rows, exact, float((plain.double() - exact).abs().max()))


def _gradient_of_q(
    mods: Mods, values: Values, rows: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    leaf = q.detach().requires_grad_()
    with torch.enable_grad():
        out = _attend(mods, values, rows, leaf, k, v)
    (gradient,) = torch.autograd.grad(out, leaf, q)
    return gradient


def _attend(
    mods: Mods, values: Values, rows: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    score = (q @ k.transpose(-1, -2)).to(wide) / math.sqrt(q.shape[3])
    env = _env(q, rows, k.shape[2], values, score)
    if mods.score is not None:
        score = torch.as_tensor(evaluate(mods.score, env)).to(wide).expand_as(score)
    if mods.mask is not None:
        allowed = torch.as_tensor(evaluate(mods.mask, env), device=q.device)
        score = score.masked_fill(~allowed, -math.inf)
    weights = torch.softmax(score, dim=-1).nan_to_num(0.0)  # rows without a key: 0
    return weights.to(v.dtype) @ v


def _env(
    q: torch.Tensor, rows: torch.Tensor, kv_len: int, values: Values, score: torch.Tensor | None = None
) -> Env:
    def axis(count: int, dim: int) -> torch.Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = count
        return torch.arange(count, device=q.device).view(shape)

    inputs = {
        Input.B: axis(q.shape[0], 0),
        Input.H: axis(q.shape[1], 1),
        Input.Q_IDX: rows.view(1, 1, -1, 1),
        Input.KV_IDX: axis(kv_len, 3),
    }
    if score is not None:
        inputs[Input.SCORE] = score
    float_dtype = torch.float32 if score is None else score.dtype
    return Env(inputs=inputs, values=values, xp=torch, float_dtype=float_dtype)


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
