"""Closed forms against brute force, and the ranges of masks that people write by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.ir.arrays import Array
from flexc.ir.build import binary, compare, const, input_, load, logic, scalar, unary, where
from flexc.ir.closed_form import closed_form, obstacles
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import Ranges
from flexc.ir.types import DType
from flexc.mods import as_mask_mod
from tests.ir.expressions import BATCH, HEADS, KV_LEN, Q_LEN, booleans, capture_values, full_grid
from tests.mods import Entry, corpus

Q, KV, B, H = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H))


def value_of(root: Expr, values: Sequence[Any], lengths: tuple[int, int, int, int]) -> Array:
    inputs = full_grid(np, lengths) | {Input.Q_LEN: np.int32(lengths[2]), Input.KV_LEN: np.int32(lengths[3])}
    return np.broadcast_to(evaluate(root, Env(inputs, values, np, np.float32)), (*lengths[:3], 1))


def dense(root: Expr, values: Sequence[Any], lengths: tuple[int, int, int, int]) -> Array:
    inputs = full_grid(np, lengths) | {Input.Q_LEN: np.int32(lengths[2]), Input.KV_LEN: np.int32(lengths[3])}
    return np.broadcast_to(evaluate(root, Env(inputs, values, np, np.float32)), lengths)


def check(mask: Expr, ranges: Ranges, values: Sequence[Any], lengths: tuple[int, int, int, int]) -> None:
    """Every allowed pair is in a range, every pair of a full part is allowed; an exact form is the mask."""
    allowed = dense(mask, values, lengths)
    kv = np.arange(lengths[3], dtype=np.int32)
    inside, full = np.zeros_like(allowed), np.zeros_like(allowed)
    firsts = []
    for r in ranges.ranges:
        bounds = [value_of(end, values, lengths) for end in (r.first, r.end, r.full_first, r.full_end)]
        for bound in (r.first, r.end, r.full_first, r.full_end):
            assert bound.dtype is DType.I32
            assert Input.KV_IDX not in inputs_of(bound)
        first, end, full_first, full_end = bounds
        own = (first <= kv) & (kv < end)
        own_full = (full_first <= kv) & (kv < full_end)
        assert not (own_full & ~own).any(), "the full part lies in its range"
        inside, full = inside | own, full | own_full
        firsts.append(first)
    assert not (allowed & ~inside).any()
    assert not (full & ~allowed).any()
    if ranges.is_exact:
        np.testing.assert_array_equal(inside, allowed)
    else:
        assert ranges.open_parts
    if ranges.is_sorted:
        assert all((a <= b).all() for a, b in pairwise(firsts))


LENGTHS = st.sampled_from([(Q_LEN, KV_LEN), (1, 40), (40, 1), (33, 17)])


@settings(max_examples=600, deadline=None)
@given(mask=booleans(4), seed=st.integers(0, 3), lengths=LENGTHS, any_length=st.booleans())
def test_any_expression(mask: Expr, seed: int, lengths: tuple[int, int], any_length: bool) -> None:
    values = capture_values(seed)
    ranges = closed_form(mask, any_length=any_length)
    if ranges is not None and ranges.holds(values, *lengths):
        check(mask, ranges, values, (BATCH, HEADS, *lengths))


# The family that must come out exact: two numbers, bounds by row, a number a head, one a batch entry.
NUMBERS = st.integers(-2, 30)


def family_values(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.integers(0, 40, 50)).astype(np.int32)
    return [
        int(rng.integers(1, 12)),
        int(rng.integers(1, 30)),
        starts,
        (starts + rng.integers(0, 12, 50)).astype(np.int64),
        rng.integers(-1, 20, HEADS).astype(np.int32),
        rng.integers(0, 3, BATCH).astype(np.int32),
    ]


C, W = scalar(0, DType.I32), scalar(1, DType.I32)
OF_HEAD, OF_BATCH = load(4, (H,), DType.I32), load(5, (B,), DType.I32)


def _rows() -> st.SearchStrategy[Expr]:
    """Integers of a row."""
    return st.one_of(
        st.just(Q),
        NUMBERS.map(const),
        st.sampled_from([C, W, OF_HEAD, OF_BATCH, input_(Input.Q_LEN), load(2, (Q,), DType.I32)]),
        NUMBERS.map(lambda c: binary(Op.ADD, Q, const(c))),
        st.just(binary(Op.SUB, Q, OF_HEAD)),
        st.just(binary(Op.FLOORDIV, Q, C)),
        st.just(binary(Op.MOD, Q, C)),
        st.just(load(3, (Q,), DType.I64)),
    )


def _keys() -> st.SearchStrategy[Expr]:
    """Integers that depend on the key in one term."""
    divisors = st.sampled_from([C, const(1), const(3), const(8), binary(Op.ADD, H, const(1))])
    plain = st.one_of(
        st.just(KV),
        NUMBERS.map(lambda c: binary(Op.SUB, KV, const(c))),
        st.just(binary(Op.SUB, Q, KV)),
        st.just(binary(Op.SUB, KV, Q)),
        st.sampled_from([2, -3]).map(lambda f: binary(Op.MUL, KV, const(f))),
    )
    return st.one_of(
        plain,
        plain,
        st.builds(lambda x, c: binary(Op.FLOORDIV, x, c), plain, divisors),
        st.builds(lambda x: binary(Op.SHR, x, const(2)), plain),
        plain.map(lambda x: unary(Op.ABS, x)),
        st.builds(lambda op, x, y: binary(op, x, y), st.sampled_from([Op.MIN, Op.MAX]), plain, _rows()),
        st.builds(lambda r, x: where(compare(Op.LT, r, const(9)), x, KV), _rows(), plain),
    )


def _family(depth: int = 2) -> st.SearchStrategy[Expr]:
    comparisons = st.sampled_from([Op.LT, Op.LE, Op.EQ, Op.NE])
    atom = st.one_of(
        st.builds(compare, comparisons, _keys(), _rows()),
        st.builds(compare, comparisons, _rows(), _keys()),
        st.just(compare(Op.LE, KV, Q)),
        st.builds(compare, comparisons, _rows(), _rows()),
        st.just(compare(Op.EQ, binary(Op.FLOORDIV, Q, C), binary(Op.FLOORDIV, KV, C))),
    )
    if depth == 0:
        return atom
    inner = _family(depth - 1)
    return st.one_of(
        atom,
        st.builds(logic, st.sampled_from([Op.AND, Op.OR]), inner, inner),
        st.builds(logic, st.sampled_from([Op.AND, Op.OR]), inner, inner),
        inner.map(lambda c: unary(Op.NOT, c)),
        st.builds(where, st.builds(compare, comparisons, _rows(), _rows()), inner, inner),
    )


@settings(max_examples=600, deadline=None)
@given(mask=_family(), seed=st.integers(0, 5), lengths=LENGTHS)
def test_the_family_is_exact(mask: Expr, seed: int, lengths: tuple[int, int]) -> None:
    values = family_values(seed)
    ranges = closed_form(mask)
    if ranges is None:
        assert "ranges a row" in obstacles(mask)[0].reason
        return
    assert ranges.is_exact
    assert ranges.holds(values, *lengths)
    check(mask, ranges, values, (BATCH, HEADS, *lengths))


MASKS = {name: entry for name, entry in corpus().items() if entry.kind != "score"}


def _traced(entry: Entry) -> tuple[Expr, list[Any], tuple[str, ...], tuple[int, int, int, int]]:
    case = entry.make()
    assert case.mask is not None
    traced = as_mask_mod(case.mask).trace()
    values = [v.detach().numpy() if isinstance(v, torch.Tensor) else v for v in traced.values]
    names = tuple(capture.name for capture in traced.graph.captures)
    return traced.graph.root, values, names, (case.batch, case.heads, case.q_len, case.kv_len)


@pytest.mark.parametrize("name", MASKS)
def test_the_corpus(name: str) -> None:
    mask, values, _, lengths = _traced(MASKS[name])
    for any_length in (False, True):
        ranges = closed_form(mask, any_length=any_length)
        if ranges is not None and ranges.holds(values, *lengths[2:]):
            check(mask, ranges, values, lengths)
