"""Work and order of a map's rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.blockmap import BlockMap, from_kinds
from flexc.ir.build import FALSE, TRUE
from flexc.ir.schedule import PARTIAL_COST, Schedule, schedule
from tests.ir.test_blockmap import CAUSAL, build, kind_arrays


def of(costs: list[float]) -> Schedule:
    values = np.asarray(costs)
    return Schedule(values, np.argsort(-values, kind="stable").astype(np.int32))


def test_a_causal_mask_starts_with_its_last_rows() -> None:
    plan = schedule(build(CAUSAL, [], 1024, 1024, block_q=128, block_kv=128))
    assert plan.order.tolist() == list(range(7, -1, -1))
    assert plan.order.dtype == np.int32
    assert plan.costs.tolist() == [i + PARTIAL_COST for i in range(8)]
    assert plan.total == 28 + 8 * PARTIAL_COST
    assert plan.imbalance == pytest.approx((7 + PARTIAL_COST) / (plan.total / 8))
    # 7 + 0, 6 + 1, 5 + 2, 4 + 3: all four processors end together.
    assert plan.makespan(4) == 7 + 2 * PARTIAL_COST
    assert plan.efficiency(4) == pytest.approx(1)
    assert plan.makespan(1) == plan.total
    assert plan.makespan(100) == 7 + PARTIAL_COST


def test_equal_rows_keep_their_order() -> None:
    plan = schedule(build(TRUE, [], 512, 512, block_q=128, block_kv=128))
    assert plan.order.tolist() == [0, 1, 2, 3]
    assert plan.imbalance == 1


def test_masks_without_work() -> None:
    for plan in (schedule(build(FALSE, [], 512, 512)), schedule(build(TRUE, [], 0, 512))):
        assert (plan.total, plan.imbalance, plan.makespan(8), plan.efficiency(8)) == (0, 1, 0, 1)


def test_batches_and_heads_are_rows_of_their_own() -> None:
    kinds = np.zeros((2, 2, 3, 4), np.uint8)
    kinds[1, 0, 2] = 2
    kinds[0, 1, 0, 1] = 1
    block_map: BlockMap = from_kinds(kinds, q_len=48, kv_len=64, block_q=16, block_kv=16)
    plan = schedule(block_map)
    assert plan.order[:2].tolist() == [8, 3]
    assert plan.costs[[8, 3]].tolist() == [4, PARTIAL_COST]


@settings(max_examples=60, deadline=None)
@given(kinds=kind_arrays())
def test_costs_are_those_of_the_tiles(kinds: np.ndarray) -> None:
    plan = schedule(from_kinds(kinds, q_len=33, kv_len=50, block_q=8, block_kv=8))
    expected = ((kinds == 2) + PARTIAL_COST * (kinds == 1)).sum(-1).reshape(-1)
    np.testing.assert_allclose(plan.costs, expected)
    assert (np.diff(plan.costs[plan.order]) <= 0).all()
    assert sorted(plan.order.tolist()) == list(range(len(expected)))


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), processors=st.integers(1, 4))
def test_makespans_are_within_the_bound_of_the_rule(costs: list[int], processors: int) -> None:
    """At most 4/3 - 1/(3 n) of the best, which is tried out."""
    plan = of([float(c) for c in costs])
    best = [0] * processors
    found = [sum(costs)]

    def place(i: int) -> None:
        if max(best) >= found[0]:
            return
        if i == len(costs):
            found[0] = max(best)
            return
        for p in range(processors):
            best[p] += costs[i]
            place(i + 1)
            best[p] -= costs[i]

    place(0)
    longest = plan.makespan(processors)
    assert longest >= max(sum(costs) / processors, max(costs))
    assert longest <= found[0] * (4 / 3 - 1 / (3 * processors)) + 1e-9
