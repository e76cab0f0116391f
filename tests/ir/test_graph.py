"""Nodes, verification, substitution, binding, and that no table misses an op."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.errors import InternalError
from flexc.ir.bind import bind
from flexc.ir.bounds_float import FLOAT_RULES
from flexc.ir.bounds_integer import INTEGER_RULES
from flexc.ir.build import FALSE, binary, compare, const, input_, load, logic, scalar, size, unary, where
from flexc.ir.evaluate import TABLE, Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.graph import Capture, ModGraph, ModKind, ModSource
from flexc.ir.interval import LEAF_RULES, SHARED_RULES
from flexc.ir.ops import COMPARISONS, INFO, Input, Op
from flexc.ir.simplify import RULES
from flexc.ir.substitute import renumber, substitute
from flexc.ir.types import DType, Storage
from flexc.ir.verify import verify
from tests.ir.expressions import CAPTURES, KV_LEN, Q_LEN, booleans, capture_values, floats, full_grid

Q, KV, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.H, Input.SCORE))
SOURCE = ModSource("window", "model.py", 3, "lambda: ...")
DISTANCE = binary(Op.SUB, Q, KV)


def graph(root: Expr, kind: ModKind = ModKind.MASK, captures: tuple[Capture, ...] = CAPTURES) -> ModGraph:
    return ModGraph(kind, root, captures, SOURCE)


def test_no_table_misses_an_op() -> None:
    assert set(INFO) == set(Op)
    assert set(TABLE) == set(Op)
    shared = set(LEAF_RULES) | set(SHARED_RULES)
    assert {op for op, info in INFO.items() if info.takes in ("leaf", "bool", "any")} <= shared
    assert set(COMPARISONS) <= shared
    assert {op for op, info in INFO.items() if info.takes in ("number", "integer")} - COMPARISONS == set(
        INTEGER_RULES
    )
    numbers = {op for op, info in INFO.items() if info.takes in ("number", "float")} - COMPARISONS
    assert numbers == set(FLOAT_RULES)
    without_rules = {Op.CONST, Op.INPUT, Op.SCALAR, Op.SIZE, Op.LOAD} | {
        op for op, info in INFO.items() if info.takes == "float" and op not in (Op.DIV, Op.POW, Op.FLOOR)
    }
    assert set(RULES) == set(Op) - without_rules


def test_equal_expressions_are_one_object() -> None:
    assert binary(Op.SUB, Q, KV) is DISTANCE
    assert copy.deepcopy(DISTANCE) is DISTANCE
    assert pickle.loads(pickle.dumps(DISTANCE)) is DISTANCE
    assert len({const(1), const(True), const(1.0), const(0.0), const(-0.0), const(math.nan)}) == 6
    assert const(math.nan) is const(math.nan)


def test_threads_make_one_node() -> None:
    made: list[list[Expr]] = []

    def work() -> None:
        node = Q
        nodes = [node := binary(Op.ADD, node, const(i + 1)) for i in range(300)]
        made.append(nodes)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a is b for nodes in made[1:] for a, b in zip(made[0], nodes, strict=True))


def test_nodes_are_collected() -> None:
    deep = Q
    for i in range(100):
        deep = binary(Op.MUL, deep, const(1000 + i))
    references = [weakref.ref(node) for node in topological(deep) if node.op is Op.MUL]
    del deep
    gc.collect()
    assert [reference() for reference in references] == [None] * 100


@settings(max_examples=150, deadline=None)
@given(mask=booleans(4), score=floats(3, score=True))
def test_what_build_makes_is_well_formed(mask: Expr, score: Expr) -> None:
    verify(graph(mask))
    verify(graph(score, ModKind.SCORE))


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (DISTANCE, "a mask_mod returns bool, not i32"),
        (Expr(Op.NOT, (FALSE, FALSE), None, DType.BOOL), "not takes 1 operands, not 2"),
        (Expr(Op.LT, (Q, SCORE), None, DType.BOOL), "lt of mixed types i32, f32"),
        (Expr(Op.AND, (Q, Q), None, DType.BOOL), "and takes bool, not i32"),
        (Expr(Op.LT, (Q, KV), None, DType.I32), "the result of lt must be bool, not i32"),
        (Expr(Op.LT, (FALSE, FALSE), None, DType.BOOL), "lt takes number, not bool"),
        (Expr(Op.EQ, (Q, Expr(Op.CONST, (), 1.0, DType.I32)), None, DType.BOOL), "a i32 literal holds 1.0"),
        (compare(Op.LT, Q, scalar(9, DType.I32)), "scalar of slot 9, with 6 captures"),
        (compare(Op.LT, Q, scalar(1, DType.I32)), "ids is a tensor, read as a number"),
        (compare(Op.LT, Q, scalar(0, DType.I64)), "window is i32, read as i64"),
        (compare(Op.LT, Q, size(0, 0)), "window is a number, read as a tensor"),
        (compare(Op.LT, Q, size(1, 1)), "size 1 of ids, which has 1 dimensions"),
        (load(2, (Q,), DType.BOOL), "1 indices into flags, which has 2 dimensions"),
        (Expr(Op.LOAD, (Q, SCORE), 2, DType.BOOL), "an index of type f32"),
        (compare(Op.LT, SCORE, const(0.0)), "a mask_mod reads the score"),
        (Expr(Op.WHERE, (Q, FALSE, FALSE), None, DType.BOOL), "the condition of where must be bool"),
        (compare(Op.LT, Q, Expr(Op.CAST, (Q,), None, DType.I32)), "cast from i32 to i32"),
        (Expr(Op.AND, (FALSE, FALSE), 3, DType.BOOL), "and carries 3"),
    ],
)
def test_verify_says_what_is_wrong(root: Expr, message: str) -> None:
    with pytest.raises(InternalError) as error:
        verify(graph(root))
    assert message in str(error.value)
    assert "the graph of window" in str(error.value)


def test_verify_lists_everything() -> None:
    bad = logic(Op.AND, compare(Op.LT, Q, scalar(7, DType.I32)), compare(Op.LT, Q, scalar(8, DType.I32)))
    with pytest.raises(InternalError) as error:
        verify(graph(bad))
    assert str(error.value).count("\n  - ") == 2


def test_substitute_at_once_and_typed() -> None:
    swapped = substitute(DISTANCE, {Input.Q_IDX: KV, Input.KV_IDX: Q})
    assert swapped is binary(Op.SUB, KV, Q)
    wide = load(0, (Q,), DType.I64)
    shifted = substitute(compare(Op.LE, KV, Q), {Input.Q_IDX: wide})
    verify(graph(shifted, captures=(Capture("perm", Storage.I64, 1),)))
    assert substitute(DISTANCE, {Input.H: const(0)}) is DISTANCE


@settings(max_examples=50, deadline=None)
@given(mask=booleans(3), offset=st.integers(1, 4))
def test_renumber_moves_every_slot(mask: Expr, offset: int) -> None:
    moved = renumber(mask, offset)
    verify(graph(moved, captures=(Capture("x", Storage.I32),) * offset + CAPTURES))
    values = capture_values(0)
    results = [
        evaluate(root, Env(full_grid(), captures, np, np.float64))
        for root, captures in ((mask, values), (moved, [0] * offset + values))
    ]
    np.testing.assert_array_equal(*results)


@settings(max_examples=100, deadline=None)
@given(mask=booleans(3))
def test_bind_leaves_only_tensors(mask: Expr) -> None:
    values = capture_values(1)
    bound = bind(mask, values, q_len=Q_LEN, kv_len=KV_LEN)
    assert not any(n.op in (Op.SCALAR, Op.SIZE) for n in topological(bound))


def test_bind_makes_lengths_and_numbers_literals() -> None:
    q_len = input_(Input.Q_LEN)
    mask = logic(Op.AND, compare(Op.LT, Q, q_len), compare(Op.LT, KV, load(0, (), DType.I32)))
    bound = bind(mask, [np.asarray(7, np.int32)], q_len=20, kv_len=9)
    assert bound is logic(Op.AND, compare(Op.LT, Q, const(20)), compare(Op.LT, KV, const(7)))
    negative = where(compare(Op.LT, scalar(0, DType.F32), const(0.0)), unary(Op.NEG, Q), Q)
    assert bind(compare(Op.LT, negative, KV), [-1.5], q_len=1, kv_len=1) is compare(
        Op.LT, unary(Op.NEG, Q), KV
    )
