"""What the kernel that builds a map is told of a mask."""

from __future__ import annotations

from flexc.ir.build import FALSE, TRUE, binary, compare, const, input_, load, logic, scalar
from flexc.ir.expr import Expr
from flexc.ir.map_form import MapForm, map_form
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import LONGEST
from flexc.ir.simplify import simplify
from flexc.ir.types import DType

Q, KV, B = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B))
CAUSAL = compare(Op.LE, KV, Q)
VALID = load(0, (B, KV), DType.BOOL)
SAME = compare(Op.EQ, load(1, (Q,), DType.I32), load(1, (KV,), DType.I32))


def form(mask: Expr) -> MapForm:
    return map_form(simplify(mask), 2)


def test_conditions_on_keys_stand_apart_from_ranges() -> None:
    found = form(logic(Op.AND, CAUSAL, VALID))
    assert found.columns is VALID
    assert found.closed is not None
    assert found.closed.is_exact
    assert form(CAUSAL).columns is None


def test_a_condition_on_keys_that_is_a_range_is_one() -> None:
    found = form(logic(Op.AND, CAUSAL, compare(Op.LT, KV, load(0, (B,), DType.I32))))
    assert found.columns is None
    assert found.closed is not None
    assert found.closed.is_exact


def test_equal_ids_bring_vectors() -> None:
    found = form(logic(Op.AND, logic(Op.AND, SAME, CAUSAL), VALID))
    (runs,) = found.runs
    assert (runs.ids, runs.run_first, runs.hull_end) == (1, 2, 5)
    assert found.is_bounded


def test_what_leaves_all_pairs_to_be_looked_at() -> None:
    parity = compare(Op.EQ, binary(Op.MOD, binary(Op.MUL, Q, KV), const(7)), const(3))
    assert not form(parity).is_bounded
    assert form(logic(Op.AND, parity, CAUSAL)).is_bounded
    assert form(VALID).is_bounded
    assert form(TRUE).is_bounded


def test_nothing_is_allowed() -> None:
    found = form(FALSE)
    assert found.closed is not None
    assert found.closed.ranges == ()


def test_ranges_are_left_out_of_calls_that_they_do_not_hold_for() -> None:
    found = form(compare(Op.LT, binary(Op.SUB, Q, KV), scalar(0, DType.I32)))
    assert found.closed is not None
    assert found.for_call((20,), 100, 100) is found
    beyond = found.for_call((20,), LONGEST + 1, 100)
    assert beyond.closed is None
    assert not beyond.is_bounded
    assert beyond.mask is found.mask
