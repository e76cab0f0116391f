"""Where parts of a mod are computed, and which are worth computing early."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flexc.ir.build import binary, cast, compare, const, input_, load, logic, scalar, size, unary
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.place import Hoists, Placement, hoists, place
from flexc.ir.types import DType

Q, KV, B, H, SCORE, Q_LEN = (
    input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H, Input.SCORE, Input.Q_LEN)
)
SLOPE = load(0, (H,), DType.F32)
ROW_ID, COLUMN_ID = load(1, (Q,), DType.I32), load(1, (KV,), DType.I32)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (const(3), Placement.KERNEL),
        (scalar(0, DType.I32), Placement.KERNEL),
        (size(0, 0), Placement.KERNEL),
        (load(0, (), DType.F32), Placement.KERNEL),
        (load(0, (const(2),), DType.F32), Placement.KERNEL),
        (Q_LEN, Placement.KERNEL),
        (B, Placement.HEAD),
        (SLOPE, Placement.HEAD),
        (ROW_ID, Placement.ROW),
        (load(1, (binary(Op.ADD, B, Q),), DType.I32), Placement.ROW),
        (COLUMN_ID, Placement.COLUMN),
        (binary(Op.SUB, Q, KV), Placement.ELEMENT),
        (SCORE, Placement.ELEMENT),
    ],
)
def test_placement(node: Expr, expected: Placement) -> None:
    assert place(node)[node] is expected


def test_order_is_partial() -> None:
    order = [Placement.KERNEL, Placement.HEAD, Placement.ROW, Placement.ELEMENT]
    assert all(a < b and b > a and a <= b and b >= a for a, b in pairwise(order))
    assert Placement.HEAD < Placement.COLUMN < Placement.ELEMENT
    assert not Placement.ROW <= Placement.COLUMN
    assert not Placement.COLUMN <= Placement.ROW
    assert Placement.ROW.join(Placement.COLUMN) is Placement.ELEMENT
    assert Placement.ROW.join(Placement.HEAD) is Placement.ROW


def test_alibi_hoists_the_slope() -> None:
    distance = cast(binary(Op.SUB, KV, Q), DType.F32)
    root = binary(Op.ADD, SCORE, binary(Op.MUL, SLOPE, distance))
    assert hoists(root) == Hoists(head=(SLOPE,), row=(), column=())


def test_document_hoists_both_ids_and_shared_head_parts() -> None:
    limit = binary(Op.ADD, load(2, (B,), DType.I32), const(1))
    near = compare(Op.LT, COLUMN_ID, limit)
    root = logic(Op.AND, compare(Op.EQ, ROW_ID, COLUMN_ID), near)
    assert hoists(root) == Hoists(head=(limit,), row=(ROW_ID,), column=(COLUMN_ID, near))


def test_roots_count_as_read() -> None:
    row_only = compare(Op.LT, Q, const(9))
    assert hoists(row_only) == Hoists(head=(), row=(row_only,), column=())
    assert hoists(SLOPE).head == (SLOPE,)


def test_trivial_parts_have_no_name() -> None:
    root = binary(Op.ADD, SCORE, cast(scalar(0, DType.I32), DType.F32))
    assert hoists(root) == Hoists(head=(), row=(), column=())
    scaled = unary(Op.NEG, scalar(0, DType.F32))
    assert hoists(binary(Op.MUL, SCORE, scaled)).head == (scaled,)
