"""What generated Hopper backwards compute, and that no role waits for ever: run on the CPU.

The kernels before and after the large one are stood in for by their definitions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flexc import masks, scores
from flexc.call import AttentionCall
from flexc.choice import backward_parts
from flexc.codegen.arguments import Source
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import ROWS_PADDED_TO, BackwardSpec, Entry, backward_spec
from flexc.codegen.hopper_backward_plan import KEYS, HopperBackwardPlan
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import TARGETS
from tests.codegen.backward_operands import numpy_operand, plain_operands
from tests.codegen.generate import Mod, spec_for
from tests.gluon_backward_in_numpy import Rows, Sums, run_backward
from tests.gluon_in_numpy import Descriptor
from tests.gradients import problem

LENGTHS = torch.tensor([70, 13, 120, 64, 1, 200, 90, 55, 100])
IDS = torch.arange(9, dtype=torch.int32).repeat_interleave(LENGTHS)[:640]
OF_BATCH = torch.stack([IDS, IDS.flip(0)])
ALIVE = torch.arange(900) % 5 != 2
REACH = (20 + torch.arange(900) % 300).int()


def _documents_of_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (OF_BATCH[b, q_idx] == OF_BATCH[b, kv_idx])


def _alive(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ALIVE[q_idx] & (q_idx >= kv_idx)


def _reach(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < REACH[q_idx]) | (ALIVE[q_idx] & (kv_idx > 500))


def _far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx + 300


class Shape(NamedTuple):
    """Batch, heads of queries and keys, lengths and head dimension."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int


def _kernel(
    call: AttentionCall, mods: tuple[Mod | None, Mod | None], shape: Shape
) -> tuple[BackwardSpec, GeneratedKernel]:
    lengths = (shape.q_len, shape.kv_len)
    spec = spec_for(*mods, head_dim=shape.dim)
    found = backward_spec(spec, call.values, lengths, deterministic=call.deterministic)
    (made,) = (of for of, entry in backward_parts(found, "sm90", (), hopper=True) if entry is Entry.HOPPER)
    return made, lower_backward(made, Entry.HOPPER, TARGETS["sm90"])


def _arguments(
    call: AttentionCall, made: BackwardSpec, kernel: GeneratedKernel, rows: dict[Source, Any]
) -> dict[str, Any]:
    """Those that are no descriptors."""
    tensors = {
        Source.Q: call.q, Source.K: call.k, Source.V: call.v, Source.GRAD_OUT: call.q, Source.GRAD_K: call.k,
        Source.GRAD_V: call.v, Source.GRAD_Q_SUM: call.q,
    }  # fmt: skip
    return plain_operands(call, made, kernel, tensors | rows)


PROCESSORS = 3
"""Programs at a time that take one tile of keys after another."""
CASES: list[tuple[Mod | None, Shape, int]] = [
    (masks.causal, Shape(1, 2, 1, 400, 500, 64), 2),
    (masks.sliding_window(530) & masks.causal, Shape(1, 1, 1, 800, 750, 64), 2),
    (None, Shape(2, 2, 1, 300, 700, 64), 2),
    (masks.document(IDS) & masks.causal, Shape(1, 2, 1, 640, 640, 64), 1),
    (_documents_of_batch, Shape(2, 2, 2, 601, 601, 64), 1),
    (masks.document(IDS), Shape(1, 2, 1, 500, 600, 64), 1),
    (masks.sliding_window(77) & masks.causal, Shape(1, 2, 1, 500, 450, 64), 1),
    (_reach, Shape(1, 2, 1, 330, 600, 64), 2),
    (masks.causal, Shape(1, 2, 2, 100, 900, 64), 2),
    (masks.document(IDS) & masks.causal, Shape(1, 2, 1, 640, 640, 128), 2),
    (_alive, Shape(1, 2, 1, 400, 333, 128), 2),
]


IN_ORDER: list[tuple[Mod | None, Shape, int]] = [
    CASES[3],
    CASES[4],
    (_reach, Shape(1, 1, 1, 200, 600, 64), 2),
    (None, Shape(1, 2, 1, 250, 300, 128), 2),
    (masks.causal, Shape(2, 1, 1, 330, 330, 128), 2),
    (masks.prefix_lm(200), Shape(1, 1, 1, 300, 300, 128), 2),
    (_far, Shape(1, 2, 1, 600, 300, 64), 2),
]


@pytest.mark.parametrize(("mask", "shape", "groups"), CASES)
def test_gradients(mask: Mod | None, shape: Shape, groups: int) -> None:
    given = _Given(mask, shape, deterministic=False)
    assert given.groups == groups
    given.check(given.run())


@pytest.mark.parametrize(("mask", "shape", "groups"), IN_ORDER)
def test_gradients_in_order(mask: Mod | None, shape: Shape, groups: int) -> None:
    given = _Given(mask, shape, deterministic=True)
    assert given.groups == groups
    found, again = given.run(), given.run(at_a_time=3)
    given.check(found)
    assert all((one == other).all() for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_tile_of_keys_a_program(deterministic: bool) -> None:
    """A soft cap on narrow heads: two kinds of weights, so few queries. One of 1 leaves the scale alone."""
    shape = Shape(1, 2, 1, 250, 300, 64)
    given = _Given(masks.causal, shape, deterministic=deterministic, score=scores.softcap(1.0))
    assert not given.plan.in_rounds
    found = given.run()
    given.check(found)
    again = given.run(at_a_time=3)
    assert not deterministic or all((x == y).all() for x, y in zip(found, again, strict=True))


class _Given:
    """Inputs of a backward, its large kernel, and what is expected."""

    def __init__(
        self, mask: Mod | None, shape: Shape, *, deterministic: bool, score: Mod | None = None
    ) -> None:
        torch.manual_seed(0)
        batch, heads, kv_heads, q_len, kv_len, dim = self.shape = shape
        self.inputs = [
            torch.randn(batch, h, n, dim).bfloat16()
            for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len))
        ]
        q, k, v, grad = self.inputs
        self.call = problem(q, k, v, mask_mod=mask, score_mod=score, deterministic=deterministic).call
        self.made, self.kernel = _kernel(self.call, (mask, score), shape)
        plan = self.kernel.plan
        assert isinstance(plan, HopperBackwardPlan)
        self.plan, self.groups = plan, plan.groups
        out, lse, self.expected = _expected(mask, q, k, v, grad, self.call.scale, score)
        self.padded = padded = -(-q_len // ROWS_PADDED_TO) * ROWS_PADDED_TO
        self.delta = np.zeros((batch, heads, padded), np.float32)
        self.shift = np.full((batch, heads, padded), np.inf, np.float32)
        self.delta[:, :, :q_len] = (out * grad.double()).sum(3)
        self.shift[:, :, :q_len] = torch.where(lse.isinf(), torch.inf, lse / np.log(2.0))

    def run(self, at_a_time: int = 6) -> list[Any]:
        """Gradients of q, k and v."""
        batch, heads, kv_heads, q_len, kv_len, dim = self.shape
        block_q, block_kv = self.plan.tiles.block_q, self.plan.tiles.block_kv
        # In order, the first keys write sums, and the others add to them.
        sums = np.full((batch * heads * self.padded, dim), np.nan if self.plan.ordered else 0.0, np.float32)
        dk, dv = (np.full((batch, kv_heads, kv_len, dim), np.nan, np.float32) for _ in range(2))
        rows = {Source.DELTA: torch.from_numpy(self.delta), Source.SHIFT: torch.from_numpy(self.shift)}
        rows[Source.LOST] = torch.zeros(1, dtype=torch.int32)
        rows[Source.TURNS] = torch.zeros(1 + batch * heads * self.padded // block_q, dtype=torch.int32)
        given = _arguments(self.call, self.made, self.kernel, rows)
        in_halves = self.plan.in_rounds and self.plan.in_turns
        given |= {
            f"{name}_desc": Descriptor(x, n, dim // 2 if in_halves and name == "dk" else dim)
            for name, x, n in zip(
                ("q", "k", "v", "dout", "dk", "dv"),
                (*map(numpy_operand, self.inputs), dk, dv),
                (block_q, block_kv, block_kv, block_q, KEYS, KEYS),
                strict=True,
            )
        }
        given |= {
            "delta_desc": Rows(self.delta, block_q),
            "shift_desc": Rows(self.shift, block_q),
            "dq_sum_desc": Sums(sums, block_q, self.plan.dq_columns, by_columns=self.plan.halves_are_columns),
        }
        programs = -(-kv_len // block_kv) * kv_heads * batch
        if self.plan.in_rounds:
            given["counter_ptr"] = np.zeros(2, np.int32)
            programs = min(programs, PROCESSORS)
        run_backward(self.kernel.source, given, programs, at_a_time)
        if self.plan.ordered:
            unvisited = rows[Source.TURNS].numpy()[1:] == 0
            sums[np.repeat(unvisited, block_q)] = 0.0
        of_rows = sums.reshape(batch, heads, self.padded, dim)
        assert not of_rows[:, :, q_len:].any()
        return [of_rows[:, :, :q_len] * self.call.scale, dk, dv]

    def check(self, found: list[Any]) -> None:
        """Whether these are the gradients."""
        for one, wanted in zip(found, self.expected, strict=True):
            assert np.abs(one - wanted).max() < 0.01 * np.abs(wanted).max()


def _expected(
    mask: Mod | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    scale: float,
    score: Mod | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Output, lse and gradients in fp64."""
    group = q.shape[1] // k.shape[1]
    given = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(group, 1) for x in given[1:])
    lengths = (*q.shape[:3], k.shape[2])
    indices = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(lengths)]
    found = given[0] @ keys.mT * scale
    if score is not None:
        found = score(found, *indices)
    if mask is not None:
        found = torch.where(mask(*indices), found, -torch.inf)
    lse = found.logsumexp(3)
    weights = torch.where(lse[..., None].isinf(), 0.0, (found - lse[..., None].nan_to_num(neginf=0.0)).exp())
    out = weights @ values
    gradients = torch.autograd.grad(out, given, grad.double())
    return out.detach(), lse.detach(), [x.numpy() for x in gradients]
