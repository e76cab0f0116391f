"""What closed forms are computed with: extents of nodes, exact forms, and forms as int32 bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.arrays import Array
from flexc.ir.build import binary, const, input_
from flexc.ir.equal_terms import replaced, replacements
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.magnitude import WIDTH, Magnitudes, assumed_numbers
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import LONGEST
from flexc.ir.simplify import simplify
from flexc.ir.symbolic import Algebra
from flexc.ir.types import DType
from tests.ir.expressions import capture_values, full_grid, integers

Q, KV, H = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.H))
NOTHING: frozenset[Any] = frozenset()


def value_of(root: Expr, seed: int) -> Array:
    """Values over a small grid, of the width that the node has."""
    value = evaluate(root, Env(full_grid(), capture_values(seed), np, np.float32))
    return np.asarray(value).astype(np.int64)


def numbers_hold(root: Expr, seed: int) -> bool:
    values = capture_values(seed)
    return all(within.holds(values[within.slot], 0) for within in assumed_numbers(root).values())


@settings(max_examples=400, deadline=None)
@given(root=integers(4), seed=st.integers(0, 3))
def test_extents_hold_every_value(root: Expr, seed: int) -> None:
    if numbers_hold(root, seed):
        extent = Magnitudes(assumed_numbers(root), NOTHING, NOTHING, LONGEST).of(root)
        value = value_of(root, seed)
        assert extent.lo <= value.min()
        assert value.max() <= extent.hi
        assert extent.inside(WIDTH[root.dtype])


@settings(max_examples=400, deadline=None)
@given(root=integers(4), seed=st.integers(0, 3), divisor=st.integers(1, 9))
def test_forms_are_exact_and_bounds_keep_what_matters(root: Expr, seed: int, divisor: int) -> None:
    """A bound is the number itself among positions, and on its side of them outside; so for quotients."""
    root = simplify(replaced(root, {KV: Q}))
    if not numbers_hold(root, seed):
        return
    algebra = Algebra(root, assumed_numbers(root), NOTHING, LONGEST)
    form, value = algebra.form(root), value_of(root, seed)
    extent = algebra.extent(form)
    assert extent.lo <= value.min()
    assert value.max() <= extent.hi
    for expected, bound in (
        (value, algebra.bound(form)),
        (value // divisor, algebra.bound(algebra.quotient(form, divisor))),
        (value + 1, algebra.bound(form + 1)),
    ):
        assert bound.dtype is DType.I32
        clipped = np.clip(value_of(bound, seed), -1, LONGEST)
        assert (clipped == np.clip(expected, -1, LONGEST)).all()


def test_order_of_remainders() -> None:
    """`x - x % c` lies between 0 and x, and behind `x - c`, also where c is not known before a call."""
    for divisor in (const(8), binary(Op.ADD, H, const(1))):
        remainder = binary(Op.MOD, Q, divisor)
        algebra = Algebra(remainder, {}, NOTHING, LONGEST)
        q, start, c = algebra.form(Q), algebra.form(Q) - algebra.form(remainder), algebra.form(divisor)
        assert algebra.extent(start).lo == 0
        assert algebra.at_most(start, q)
        assert algebra.at_most(q + 1, start + c)
        assert not algebra.at_most(q + 2, start + c)
        assert not algebra.at_most(q, start)
        assert algebra.product(algebra.symbol(binary(Op.FLOORDIV, Q, divisor)), divisor) == start


def test_equations_between_row_and_key() -> None:
    def reads_kv(node: Expr) -> bool:
        return node is KV or any(reads_kv(arg) for arg in node.args)

    chunk = const(8)
    of_key, of_query = (binary(Op.FLOORDIV, x, chunk) for x in (KV, Q))
    table = replacements(of_query, of_key, reads_kv)
    assert table[of_key] is of_query
    inside = binary(Op.MOD, KV, chunk)
    assert table[inside] is binary(Op.SUB, KV, binary(Op.SUB, Q, binary(Op.MOD, Q, chunk)))
    assert replacements(of_query, Q, reads_kv) == {}
    assert replacements(of_key, KV, reads_kv) == {}
    untouched = binary(Op.ADD, Q, KV)
    assert replaced(untouched, table) is untouched
