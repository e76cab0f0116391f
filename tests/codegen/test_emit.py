"""Graphs as Triton statements: every op has a form, and the text says what the graph means."""

from __future__ import annotations

import pytest

from flexc.codegen.emit import Block, Scope, emit, emits
from flexc.codegen.signs import nonnegative
from flexc.ir.build import binary, cast, compare, const, input_, load, logic, scalar, unary, where
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType, Storage
from tests.codegen.generate import generate, spec_for_graphs

Q, KV, B, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.SCORE))
CAPTURES = (
    Capture("n", Storage.I32),
    Capture("flag", Storage.BOOL),
    Capture("table", Storage.BF16, 2),
    Capture("seen", Storage.BOOL, 1),
)
NAMES = tuple(c.name for c in CAPTURES)
N, FLAG = scalar(0, DType.I32), scalar(1, DType.BOOL)
DISTANCE = binary(Op.SUB, Q, KV)


def block(root: Expr, *, unit_stride: frozenset[int] = frozenset(), exact: bool = False) -> Block:
    spec = spec_for_graphs(captures=CAPTURES, unit_stride=unit_stride)
    known = frozenset({root}) if exact else frozenset()
    return emit(Scope(spec, NAMES, {}, set(NAMES), known), [root], [None])


def text(root: Expr) -> str:
    made = block(root)
    return "; ".join([*made.statements, *made.results])


@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.value)
def test_every_op_has_a_triton_form(op: Op) -> None:
    assert emits(op)


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (binary(Op.SUB, Q, binary(Op.SUB, KV, N)), "q_idx - (kv_idx - n)"),
        (binary(Op.SUB, DISTANCE, N), "q_idx - kv_idx - n"),
        (binary(Op.MUL, DISTANCE, N), "(q_idx - kv_idx) * n"),
        (unary(Op.NEG, DISTANCE), "-(q_idx - kv_idx)"),
        (binary(Op.DIV, SCORE, binary(Op.MUL, SCORE, SCORE)), "score / (score * score)"),
        (binary(Op.BIT_AND, binary(Op.BIT_OR, Q, KV), N), "(q_idx | kv_idx) & n"),
        (binary(Op.SHL, binary(Op.ADD, Q, KV), const(2)), "q_idx + kv_idx << 2"),
        (logic(Op.AND, compare(Op.LT, Q, KV), FLAG), "(q_idx < kv_idx) & (flag != 0)"),
        (unary(Op.NOT, compare(Op.LT, Q, KV)), "~(q_idx < kv_idx)"),
        (compare(Op.NE, FLAG, compare(Op.LT, Q, N)), "(flag != 0) ^ (q_idx < n)"),
        (compare(Op.EQ, FLAG, compare(Op.LT, Q, N)), "~((flag != 0) ^ (q_idx < n))"),
        (binary(Op.ADD, SCORE, const(-2.5)), "score + -2.5"),
        (binary(Op.MUL, SCORE, const(-2.5)), "score * -2.5"),
        (binary(Op.MUL, input_(Input.GRAD), SCORE), "grad * score"),
        (where(FLAG, SCORE, const(float("-inf"))), 'tl.where(flag != 0, score, float("-inf"))'),
        (cast(DISTANCE, DType.F32), "(q_idx - kv_idx).to(tl.float32)"),
        (cast(const(3), DType.F32), "3.0"),
    ],
)
def test_operators_bind_as_in_python(root: Expr, expected: str) -> None:
    assert text(root) == expected


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (binary(Op.FLOORDIV, DISTANCE, const(8)), "q_idx - kv_idx >> 3"),
        (binary(Op.MOD, DISTANCE, const(8)), "q_idx - kv_idx & 7"),
        (binary(Op.FLOORDIV, Q, const(5)), "q_idx // 5"),
        (binary(Op.MOD, Q, const(5)), "q_idx % 5"),
        (binary(Op.FLOORDIV, DISTANCE, const(5)), "floor_div(q_idx - kv_idx, 5)"),
        (binary(Op.MOD, Q, const(-5)), "floor_mod(q_idx, -5)"),
        (binary(Op.MOD, Q, N), "floor_mod(q_idx, n)"),
        (unary(Op.SIGN, DISTANCE), "sign(q_idx - kv_idx)"),
        (unary(Op.TANH, SCORE), "tanh(score)"),
        (binary(Op.POW, SCORE, const(3.0)), "power(score, 3.0)"),
    ],
)
def test_helpers_are_called_where_triton_differs_from_python(root: Expr, expected: str) -> None:
    made = block(root)
    assert made.results == [expected]
    called = expected.partition("(")[0]
    assert made.helpers == (
        {called} if called in ("floor_div", "floor_mod", "sign", "tanh", "power") else set()
    )


def test_what_is_used_twice_is_named_once() -> None:
    square = binary(Op.MUL, DISTANCE, DISTANCE)
    assert text(square) == "index = q_idx - kv_idx; index * index"
    near = compare(Op.LT, DISTANCE, N)
    either = logic(Op.OR, logic(Op.AND, near, FLAG), unary(Op.NOT, near))
    assert text(either).startswith("mask = q_idx - kv_idx < n; ")


def test_new_names_avoid_those_in_use() -> None:
    spec = spec_for_graphs()
    made = emit(Scope(spec, (), {}, {"index", "index_2"}), [binary(Op.MUL, DISTANCE, DISTANCE)], [None])
    assert made.statements == ["index_3 = q_idx - kv_idx"]


def test_division_is_rounded_correctly_on_request() -> None:
    quotient = binary(Op.DIV, SCORE, const(49.0))
    assert block(quotient).results == ["score / 49.0"]
    assert block(quotient, exact=True).results == ["tl.div_rn(score, 49.0)"]
    assert block(unary(Op.SQRT, SCORE), exact=True).results == ["tl.sqrt_rn(score)"]


def test_a_decision_on_a_quotient_sees_it_correctly_rounded() -> None:
    def rows(b, h, q_idx, kv_idx):
        return (q_idx / 49).floor() == (kv_idx / 49).floor()

    def ramp(score, b, h, q_idx, kv_idx):
        return score / 49 + (q_idx / 49).floor()

    for source in (generate(rows).source, generate(None, ramp).source):
        assert source.count("tl.floor(tl.div_rn(") == source.count("tl.div_rn(") > 0


def test_loads_are_guarded_and_wrap_negative_indices() -> None:
    made = block(load(2, (Q, DISTANCE), DType.F32), unit_stride=frozenset({2}))
    assert made.statements == [
        "index = q_idx - kv_idx",
        "index_2 = tl.where(index < 0, index + table_size_1, index)",
        "table_at = table_ptr + q_idx * table_stride_0 + index_2",
        "table_inside = (q_idx < table_size_0) & (index_2 >= 0) & (index_2 < table_size_1)",
    ]
    assert made.results == ["tl.load(table_at, mask=table_inside, other=0).to(tl.float32)"]
    assert made.arguments == {"table_ptr", "table_stride_0", "table_size_0", "table_size_1"}
    assert block(load(3, (KV,), DType.BOOL)).statements == [
        "mask = tl.load(seen_ptr + kv_idx * seen_stride_0, mask=kv_idx < seen_size_0, other=0) != 0"
    ]


def test_what_is_never_negative() -> None:
    half = binary(Op.FLOORDIV, Q, const(2))
    known = {
        half: True,
        binary(Op.MOD, DISTANCE, const(7)): True,
        binary(Op.MOD, Q, const(-7)): False,
        DISTANCE: False,
        N: False,
        unary(Op.ABS, DISTANCE): True,
        binary(Op.MAX, DISTANCE, const(0)): True,
        binary(Op.MIN, Q, DISTANCE): False,
        binary(Op.BIT_AND, DISTANCE, const(7)): True,
        unary(Op.NEG, Q): False,
        where(FLAG, Q, KV): True,
        where(FLAG, Q, N): False,
        cast(cast(Q, DType.F32), DType.I32): False,
    }
    found = nonnegative(*known)
    assert {node: node in found for node in known} == known
