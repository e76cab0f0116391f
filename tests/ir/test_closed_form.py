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
from flexc.ir.build import binary, cast, compare, const, input_, load, logic, scalar, unary, where
from flexc.ir.closed_form import closed_form, obstacles
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input, Op
from flexc.ir.printer import to_formula
from flexc.ir.ranges import LONGEST, Ranges
from flexc.ir.symbolic import without_saturation
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


def ranges_as_text(name: str) -> list[str]:
    mask, _, names, _ = _traced(MASKS[name])
    ranges = closed_form(mask)
    assert ranges is not None
    assert ranges.is_exact
    bounds = [[to_formula(without_saturation(end), names) for end in (r.first, r.end)] for r in ranges.ranges]
    return [f"{first} .. {end}" for first, end in bounds]


EXACT = {
    "causal": ["0 .. q_idx + 1"],
    "causal_aligned_to_the_end": ["0 .. q_idx + offset + 1"],
    "not_causal": ["q_idx + 1 .. kv_len"],
    "sliding_window": ["max(q_idx - W + 1, 0) .. q_idx + 1"],
    "default_arguments": ["max(q_idx - size, 0) .. q_idx + size + 1"],
    "window_and_first_keys": ["0 .. min(q_idx + 1, 4)", "max(q_idx - W + 1, 0) .. q_idx + 1"],
    "prefix_lm": ["0 .. max(P, q_idx + 1)"],
    "prefix_lm_by_batch": ["0 .. max(P[b], q_idx + 1)"],
    "chunked": ["q_idx - q_idx % C .. q_idx + 1"],
    "document_from_cu_seqlens": ["max(first_of[q_idx], 0) .. min(q_idx + 1, end_of[q_idx])"],
    "gym_packed_causal_document": ["max(offsets[document_id[q_idx]], 0) .. q_idx + 1"],
    "block_diffusion": [
        "q_idx % L - q_idx % L % bs .. where(q_idx < L, min(L, q_idx % L + bs - q_idx % L % bs), 0)",
        "L .. where(q_idx < L, q_idx % L + L - q_idx % L % bs, q_idx % L + L + bs - q_idx % L % bs)",
    ],
    "padding_by_length": ["0 .. where(q_idx < lengths[b], lengths[b], 0)"],
    "two_windows_by_head": ["max(q_idx - windows[h] + 1, 0) .. q_idx + 1"],
    "even_batches_only": ["0 .. where(b % 2 == 0, q_idx + 1, 0)"],
    "dense_rows": ["0 .. where(rows[b, q_idx], kv_len, 0)"],
    "whole_rows_masked": ["0 .. where(q_idx % 5 != 2 and q_idx >= 40, q_idx + 1, 0)"],
    "nothing_allowed": [],
    "torch_noop": ["0 .. kv_len"],
    "ranges_of_a_row": ["max(ranges[q_idx, 0], 0) .. ranges[q_idx, 1]"],
    "hf_chunked_causal": ["max(q_idx - (q_idx - left_padding[b]) % chunk_size, 0) .. q_idx + 1"],
    "gym_batchify": ["q_idx - q_idx % batchify_size .. q_idx + 1"],
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_ranges(name: str) -> None:
    assert ranges_as_text(name) == EXACT[name]


ALSO_EXACT = (
    "document_by_search",
    "gym_tree_training",
    "gym_block_diffusion",
    "gym_spatial_head",
    "hf_sliding_window_bidirectional",
    "hf_offsets",
    "sizes_of_captures",
    "callable_object",
    "bound_method",
    "partial_of_a_function",
    "loop_over_captured_windows",
    "first_visited_block_is_empty_for_some_rows",
)


@pytest.mark.parametrize("name", ALSO_EXACT)
def test_exact_too(name: str) -> None:
    """`test_the_corpus` compares them with their masks; here none may be given up."""
    mask, values, _, lengths = _traced(MASKS[name])
    ranges = closed_form(mask)
    assert ranges is not None
    assert ranges.is_exact
    assert ranges.holds(values, *lengths[2:])


def test_composed_masks() -> None:
    causal, window = compare(Op.LE, KV, Q), compare(Op.LT, binary(Op.SUB, Q, KV), const(8))
    prefix = compare(Op.LT, KV, const(5))
    both = closed_form(logic(Op.AND, causal, window))
    either = closed_form(logic(Op.OR, causal, logic(Op.AND, causal, window)))
    with_prefix = closed_form(logic(Op.AND, causal, logic(Op.OR, prefix, window)))
    assert both is not None
    assert either is not None
    assert with_prefix is not None
    after_q = binary(Op.ADD, Q, const(1))
    assert [(r.first, r.end) for r in both.ranges] == [
        (binary(Op.MAX, binary(Op.SUB, Q, const(7)), const(0)), after_q)
    ]
    assert [(r.first, r.end) for r in either.ranges] == [(const(0), after_q)]
    assert len(with_prefix.ranges) == 2
    assert with_prefix.is_sorted


def test_huge_masks_are_given_up() -> None:
    """Hundreds of borders, terms and levels end in an answer, not in a stack overflow or a long wait."""
    border = [binary(Op.FLOORDIV, Q, const(i + 2)) for i in range(240)]
    every, some, deep, total = compare(Op.LE, KV, Q), compare(Op.EQ, KV, Q), KV, KV
    for i, row in enumerate(border):
        every = logic(Op.AND, every, compare(Op.NE, KV, row))
        some = logic(Op.OR, some, compare(Op.EQ, KV, row))
        deep = unary(Op.ABS, binary(Op.SUB, deep, const(i)))
        total = binary(Op.ADD, total, row)
    for mask in (every, some, compare(Op.LT, deep, Q), compare(Op.LT, total, Q)):
        assert closed_form(mask) is None
        assert obstacles(mask)


def test_an_equation_said_twice_is_not_lost() -> None:
    twice = binary(Op.MUL, KV, const(2))
    mask = unary(Op.NOT, logic(Op.OR, compare(Op.NE, twice, Q), compare(Op.NE, Q, twice)))
    ranges = closed_form(mask)
    assert ranges is not None
    assert ranges.is_exact
    check(mask, ranges, [], (1, 1, 30, 30))


def test_extreme_captured_values() -> None:
    """Windows and offsets at the ends of 32 and 64 bits stand for all keys or none: nothing wraps."""
    values = [
        np.array([2**31 - 1, -(2**31), 7], np.int32),
        np.array([2**63 - 1, -(2**63), 7], np.int64),
        np.array([2**31 - 1, -(2**31), 12], np.int32),
    ]
    narrow, wide, other = (load(i, (H,), t) for i, t in enumerate((DType.I32, DType.I64, DType.I32)))
    distance = binary(Op.SUB, Q, KV)
    masks = [
        *(compare(op, distance, w) for op in (Op.LT, Op.LE, Op.NE) for w in (narrow, wide)),
        *(compare(op, w, KV) for op in (Op.LT, Op.LE) for w in (narrow, wide)),
        *(compare(op, KV, w) for op in (Op.LT, Op.LE, Op.EQ) for w in (narrow, wide)),
        compare(Op.LT, binary(Op.SUB, Q, narrow), KV),
        *(compare(op, binary(Op.FLOORDIV, KV, const(4)), w) for op in (Op.LT, Op.LE) for w in (narrow, wide)),
        *(compare(Op.LE, w, binary(Op.FLOORDIV, KV, binary(Op.ADD, H, const(3)))) for w in (narrow, wide)),
        compare(Op.LE, binary(Op.MUL, KV, const(3)), wide),
        logic(Op.AND, compare(Op.LT, distance, narrow), compare(Op.LE, KV, other)),
    ]
    for mask in masks:
        ranges = closed_form(mask)
        assert ranges is not None
        assert ranges.is_exact
        check(mask, ranges, values, (1, 3, 20, 24))


def test_strides_are_captured_numbers() -> None:
    """Compressed attention: key i stands for the tokens up to `i * stride + length`."""
    last = binary(Op.ADD, binary(Op.MUL, KV, C), W)
    for op in (Op.LT, Op.LE, Op.EQ, Op.NE):
        for mask in (compare(op, last, Q), compare(op, Q, last), compare(op, unary(Op.ABS, last), W)):
            for seed in range(4):
                values = family_values(seed)
                ranges = closed_form(mask)
                assert ranges is not None
                assert ranges.is_exact
                assert ranges.holds(values, 90, 60)
                check(mask, ranges, values, (1, 1, 90, 60))


def test_numbers_are_checked_before_use() -> None:
    divisor = scalar(0, DType.I32)
    chunk = compare(Op.EQ, binary(Op.FLOORDIV, Q, divisor), binary(Op.FLOORDIV, KV, divisor))
    ranges = closed_form(chunk)
    assert ranges is not None
    assert ranges.holds([4], 100, 100)
    assert not ranges.holds([0], 100, 100)
    assert not ranges.holds([-4], 100, 100)
    assert not ranges.holds([4], 100, LONGEST + 1)

    compressed = closed_form(compare(Op.LE, binary(Op.MUL, KV, divisor), Q))
    assert compressed is not None
    assert compressed.is_exact
    assert compressed.holds([16], 2**22, 2**22)
    assert not compressed.holds([16], 2**22, 2**22 + 1)
    assert not compressed.holds([-16], 64, 64)
    assert not compressed.holds([2**20], 64, 64)

    mask, values, _, _ = _traced(MASKS["block_diffusion"])
    halves = closed_form(mask)
    assert halves is not None
    length = values[0]
    assert halves.holds(values, 2 * length, 2 * length)
    assert not halves.holds(values, 2 * length, 2 * length + 1)
    longer = closed_form(mask, any_length=True)
    assert longer is not None
    assert longer.holds(values, 10 * length, 10 * length)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (compare(Op.LT, binary(Op.BIT_XOR, KV, const(5)), Q), "is not affine in kv_idx"),
        (load(0, (Q, KV), DType.BOOL), "reads a captured tensor at kv_idx"),
        (compare(Op.EQ, binary(Op.MOD, KV, const(3)), const(0)), "is periodic in kv_idx"),
        (compare(Op.LT, binary(Op.MUL, KV, const(2**20)), Q), "may wrap its 32 bits"),
        (
            compare(Op.LT, binary(Op.MUL, KV, binary(Op.MOD, H, const(4))), Q),
            "multiplies by what may be zero or less",
        ),
        (compare(Op.LT, cast(KV, DType.F32), const(2.5)), "compares floats"),
        (
            compare(Op.LT, binary(Op.FLOORDIV, KV, load(0, (), DType.I32)), Q),
            "divides by what may be zero or less",
        ),
        (
            compare(Op.LT, binary(Op.ADD, KV, binary(Op.FLOORDIV, KV, const(2))), Q),
            "is not the only term of kv_idx in its comparison",
        ),
    ],
)
def test_reasons(mask: Expr, reason: str) -> None:
    assert closed_form(mask) is None
    assert [o.reason for o in obstacles(mask)] == [reason]
    rest = closed_form(logic(Op.AND, compare(Op.LE, KV, Q), mask))
    assert rest is not None
    assert not rest.is_exact
    assert rest.open_parts == (obstacles(mask)[0].part,)
    assert [r.end for r in rest.ranges] == [binary(Op.ADD, Q, const(1))]
