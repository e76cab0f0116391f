"""Masks of one range as comparisons with its ends: they allow the same pairs, by numbers near the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexc import masks
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import Entry, backward_spec
from flexc.codegen.blocks import exact_ranges, turned
from flexc.codegen.bounds import BY_KEYS
from flexc.codegen.design import Design
from flexc.codegen.hopper_backward_plan import suited
from flexc.codegen.hopper_masks import by_ends
from flexc.codegen.nearness import compared_rows
from flexc.codegen.target import TARGETS
from flexc.ir.expr import Expr
from flexc.ir.simplify import simplify
from flexc.resolve import resolve
from tests.codegen.generate import generate, spec_for
from tests.ir.test_closed_form import _family, dense, family_values, value_of


@settings(max_examples=200, deadline=None)
@given(
    mask=_family(),
    seed=st.integers(0, 5),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 70)),
)
def test_the_ends_of_a_range_say_the_same(mask: Expr, seed: int, lengths: tuple[int, int]) -> None:
    mask, values, shape = simplify(mask), family_values(seed), (2, 3, *lengths)
    ranges = exact_ranges(mask)
    assume(ranges is not None and len(ranges.ranges) == 1 and ranges.holds(values, *lengths))
    found = by_ends(mask, ranges)
    np.testing.assert_array_equal(dense(found, values, shape), dense(mask, values, shape))
    for row in compared_rows(found) or ():
        assert np.abs(value_of(row, values, shape).astype(np.int64)).max() <= 2**30 + 2**29


@settings(max_examples=200, deadline=None)
@given(
    mask=_family(),
    seed=st.integers(0, 5),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 70)),
)
def test_the_queries_that_see_a_key_are_the_same(mask: Expr, seed: int, lengths: tuple[int, int]) -> None:
    mask, values, shape = simplify(mask), family_values(seed), (2, 3, *lengths)
    ranges = exact_ranges(turned(mask, BY_KEYS))
    assume(ranges is not None and len(ranges.ranges) == 1 and ranges.holds(values, *reversed(lengths)))
    found = by_ends(mask, ranges, BY_KEYS)
    np.testing.assert_array_equal(dense(found, values, shape), dense(mask, values, shape))
    for column in compared_rows(turned(found, BY_KEYS)) or ():
        numbers = value_of(column, values, (2, 3, lengths[1], lengths[0]))
        assert np.abs(numbers.astype(np.int64)).max() <= 2**30 + 2**29


def test_two_ranges_stay_a_mask() -> None:
    def window_and_first_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 100) | (kv_idx < 5))

    assert any("mask_mod(" in line for line in _lines(window_and_first_keys))


def _lines(mask: Any) -> list[str]:
    """Where a mask applies in the loop of a kernel, and how."""
    source = generate(mask, design=Design.HOPPER).source
    lines = source[source.index("def attend(") :].split("\n")
    return [line.strip() for line in lines if "kv_on <" in line or "<= kv_on" in line or "allowed" in line]


def _backward(mask: Any) -> str:
    """Its large kernel, as far as it computes."""
    spec = spec_for(mask, head_dim=64, return_lse=True)
    backward = suited(backward_spec(spec, resolve(None, mask)[1], None))
    source = lower_backward(backward, Entry.HOPPER, TARGETS["sm90"]).source
    return source[source.index("def next_tile(") :]


def test_a_backward_compares_rows_with_each_end_where_it_matters() -> None:
    source = _backward(masks.sliding_window(1000) & masks.causal)
    assert (
        "(none | (q_start < full_first)).to(gl.int32) + (none | (q_start >= full_end)).to(gl.int32) * 2"
        in source
    )
    loop = source[source.index("for step in range(second, steps)") :]
    for bit, side in ((1, "kv_idx - q_from <= q_on"), (2, "q_on < column_value - q_from")):
        branch = loop.index(f"if (start & {bit}) != 0:")
        assert f"score = gl.where({side}, score" in loop[branch : branch + 200]
    assert "gl.where(kv_idx - q_from <= q_on, score" in _backward(masks.causal)
    assert "start & 2" not in _backward(masks.causal)


def test_a_backward_of_documents_counts_rows_from_a_thread_too() -> None:
    source = _backward(masks.document(torch.arange(900, dtype=torch.int32) // 100) & masks.causal)
    assert "allowed = mask_mod(q_on, kv_idx - q_from, " in source


def test_a_backward_of_a_mask_that_reckons_with_rows_knows_them() -> None:
    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + kv_idx) % 2 == 0

    source = _backward(even)
    assert "mask_mod(q_here, kv_idx)" in source
    assert "q_on" not in source


def test_a_prefix_is_one_comparison() -> None:
    lengths = torch.ones(4, dtype=torch.int32)

    def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    for mask in (masks.prefix_lm(100), prefix):
        beyond, *sides = _lines(mask)
        assert "kv_on < kv_len" in beyond
        # Of the first tile, and of each loop over the others.
        assert sides == 3 * ['score = gl.where(kv_on < row_value - kv_from, score, float("-inf"))']


def test_chunks_have_two_sides() -> None:
    def chunks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx // 64 == kv_idx // 64

    source = generate(chunks, design=Design.HOPPER).source
    loop = source[source.index("for done in range(") :]
    assert loop.index("if kv_start < full_first:") < loop.index("row_value - kv_from <= kv_on")
    assert loop.index("if kv_start >= full_end:") < loop.index("kv_on < row_value_2 - kv_from")
