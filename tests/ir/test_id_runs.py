"""Ranges of masks by equal ids, with vectors of where the ids lie, against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.arrays import Array
from flexc.ir.build import binary, compare, const, input_, load, logic, unary
from flexc.ir.expr import Expr
from flexc.ir.id_runs import closed_form_with_runs, find_id_equalities
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType
from tests.ir.test_closed_form import check

Q, KV, B, H = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H))
CAUSAL = compare(Op.LE, KV, Q)
LENGTH = 37


def at(position: Expr, *leading: Expr, slot: int = 0) -> Expr:
    return load(slot, (*leading, position), DType.I32)


SAME = compare(Op.EQ, at(Q), at(KV))
SAME_BY_BATCH = compare(Op.EQ, at(KV, B, slot=1), at(Q, B, slot=1))


def vectors(ids: Array) -> list[Array]:
    """run_first, run_end, hull_first and hull_end of ids [..., positions], by the definition."""
    found = [np.zeros(ids.shape, np.int32) for _ in range(4)]
    for place in np.ndindex(ids.shape):
        row, i = ids[place[:-1]], place[-1]
        same = row == row[i]
        others = np.flatnonzero(~same)
        positions = np.flatnonzero(same)
        before, after = others[others < i], others[others > i]
        found[0][place] = before[-1] + 1 if len(before) else 0
        found[1][place] = after[0] if len(after) else len(row)
        found[2][place], found[3][place] = positions[0], positions[-1] + 1
    return found


def make_values(seed: int, *, sorted_ids: bool) -> list[Any]:
    rng = np.random.default_rng(seed)
    one, many = rng.integers(-1, 5, LENGTH), rng.integers(0, 4, (2, LENGTH))
    if sorted_ids:
        one, many = np.sort(one), np.sort(many, axis=-1)
    return [one.astype(np.int32), many.astype(np.int64)]


def with_vectors(values: list[Any], runs: tuple[Any, ...]) -> list[Any]:
    extended = list(values)
    for of_ids in runs:
        assert of_ids.run_first == len(extended)
        extended += vectors(values[of_ids.ids])
    return extended


def masks() -> st.SearchStrategy[Expr]:
    atoms = st.sampled_from(
        [
            CAUSAL,
            SAME,
            SAME_BY_BATCH,
            compare(Op.NE, at(Q), at(KV)),
            compare(Op.LT, KV, const(5)),
            compare(Op.LT, binary(Op.SUB, Q, KV), const(4)),
            compare(Op.LE, const(0), at(Q)),
            compare(Op.LE, const(0), at(KV)),
            compare(Op.EQ, B, const(0)),
        ]
    )
    grown = st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds(logic, st.sampled_from([Op.AND, Op.OR]), inner, inner),
            inner.map(lambda c: unary(Op.NOT, c)),
        ),
        max_leaves=5,
    )
    return st.builds(logic, st.sampled_from([Op.AND, Op.OR]), st.sampled_from([SAME, SAME_BY_BATCH]), grown)


@settings(max_examples=300, deadline=None)
@given(mask=masks(), seed=st.integers(0, 5), sorted_ids=st.booleans(), vouched=st.booleans())
def test_ranges_with_runs(mask: Expr, seed: int, sorted_ids: bool, vouched: bool) -> None:
    values = make_values(seed, sorted_ids=sorted_ids)
    ranges, runs = closed_form_with_runs(mask, len(values), contiguous=vouched and sorted_ids)
    if ranges is not None:
        check(mask, ranges, with_vectors(values, runs), (2, 1, LENGTH, LENGTH))


def test_causal_documents() -> None:
    mask = logic(Op.AND, CAUSAL, SAME)
    ranges, runs = closed_form_with_runs(mask, 1)
    assert ranges is not None
    assert [(r.ids, r.run_first, r.run_end, r.hull_first, r.hull_end) for r in runs] == [(0, 1, 2, 3, 4)]
    (only,) = ranges.ranges
    after_q = binary(Op.ADD, Q, const(1))
    assert (only.first, only.end) == (at(Q, slot=3), after_q)
    assert (only.full_first, only.full_end) == (at(Q, slot=1), after_q)
    assert ranges.open_parts == (SAME,)

    exact, _ = closed_form_with_runs(mask, 1, contiguous=True)
    assert exact is not None
    assert exact.is_exact
    assert [(r.first, r.end) for r in exact.ranges] == [(at(Q, slot=1), after_q)]


def test_what_is_an_equality_of_ids() -> None:
    by_batch = find_id_equalities(logic(Op.OR, SAME_BY_BATCH, CAUSAL))
    assert [(e.slot, e.leading) for e in by_batch] == [(1, (B,))]
    both = find_id_equalities(logic(Op.AND, SAME, unary(Op.NOT, SAME_BY_BATCH)))
    assert {e.slot for e in both} == {0, 1}


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        compare(Op.EQ, at(Q), at(KV, slot=1)),
        compare(Op.EQ, at(Q, B), at(KV, H)),
        compare(Op.EQ, at(Q, KV), at(KV, KV)),
        compare(Op.EQ, at(binary(Op.ADD, Q, const(1))), at(KV)),
        compare(Op.LE, at(Q), at(KV)),
    ],
)
def test_what_is_none(mask: Expr) -> None:
    assert find_id_equalities(mask) == ()
    assert closed_form_with_runs(mask, 2)[1] == ()


def test_block_diffusion_over_documents() -> None:
    """Contiguous ids join any closed form, those for few keys included."""
    half, block = const(16), const(4)
    noised, clean = compare(Op.LT, KV, half), compare(Op.LE, half, KV)
    of_key, of_query = (binary(Op.FLOORDIV, binary(Op.MOD, x, half), block) for x in (KV, Q))
    own = logic(Op.AND, noised, compare(Op.EQ, of_key, of_query))
    diffusion = logic(Op.OR, own, logic(Op.AND, clean, compare(Op.LT, of_key, of_query)))
    mask = logic(Op.AND, diffusion, SAME)
    values = make_values(1, sorted_ids=True)
    ranges, runs = closed_form_with_runs(mask, 2, contiguous=True)
    assert ranges is not None
    assert ranges.is_exact
    assert ranges.longest == 32
    check(mask, ranges, with_vectors(values, runs), (1, 1, 32, 32))
    rough, _ = closed_form_with_runs(mask, 2)
    assert rough is None or not rough.is_exact
