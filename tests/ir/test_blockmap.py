"""Block maps against brute force, and what is done with maps against dense arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.errors import InternalError
from flexc.ir.arrays import Array
from flexc.ir.blockmap import BlockMap, TileKind, build_block_map, from_kinds
from flexc.ir.build import FALSE, TRUE, binary, cast, compare, const, input_, load, logic
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType
from tests.ir.expressions import BATCH, HEADS, KV_LEN, Q_LEN, booleans, capture_values, full_grid

Q, KV, B, H = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H))
CAUSAL = compare(Op.LE, KV, Q)
EVEN = compare(Op.EQ, binary(Op.MOD, B, const(2)), const(0))


def window(width: int) -> Expr:
    return logic(Op.AND, CAUSAL, compare(Op.LT, binary(Op.SUB, Q, KV), const(width)))


def same(slot: int) -> Expr:
    return compare(Op.EQ, load(slot, (Q,), DType.I32), load(slot, (KV,), DType.I32))


def build(mask: Expr, values: list[Any], q_len: int, kv_len: int, **options: Any) -> BlockMap:
    defaults = {"batch": 1, "heads": 1, "block_q": 128, "block_kv": 64}
    return build_block_map(mask, values, q_len=q_len, kv_len=kv_len, **(defaults | options))


def dense_mask(mask: Expr, values: list[Any], lengths: tuple[int, int, int, int]) -> Array:
    inputs = full_grid(np, lengths) | {Input.Q_LEN: lengths[2], Input.KV_LEN: lengths[3]}
    return np.broadcast_to(evaluate(mask, Env(inputs, values, np, np.float32)), lengths)


def brute_kinds(dense: Array, block_q: int, block_kv: int) -> Array:
    batch, heads, q_len, kv_len = dense.shape
    kinds = np.zeros((batch, heads, -(-q_len // block_q), -(-kv_len // block_kv)), np.uint8)
    for i in range(kinds.shape[2]):
        for j in range(kinds.shape[3]):
            tile = dense[:, :, i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
            full = tile.all((2, 3)) & ((j + 1) * block_kv <= kv_len)
            kinds[:, :, i, j] = np.where(full, 2, tile.any((2, 3)))
    return kinds


def kinds_of(block_map: BlockMap, batch: int, heads: int) -> Array:
    return np.stack([[np.asarray(block_map.kinds(b, h)) for h in range(heads)] for b in range(batch)])


def check_form(block_map: BlockMap) -> None:
    """Sorted, disjoint, joined, inside the grid."""
    offsets, runs = np.asarray(block_map.offsets), np.asarray(block_map.runs)
    assert offsets.dtype == runs.dtype == np.int32
    assert offsets.shape == (block_map.rows + 1,)
    assert (offsets[0], offsets[-1]) == (0, len(runs))
    for start, stop in pairwise(offsets):
        row = runs[start:stop]
        assert (row[:, 0] < row[:, 1]).all()
        assert ((row[:, 0] >= 0) & (row[:, 1] <= block_map.kv_blocks)).all()
        assert (row[1:, 0] >= row[:-1, 1]).all()
        touching = row[1:, 0] == row[:-1, 1]
        assert (row[1:, 2] != row[:-1, 2])[touching].all()
        assert np.isin(row[:, 2], (TileKind.PARTIAL, TileKind.FULL)).all()


@settings(max_examples=120, deadline=None)
@given(
    mask=booleans(4),
    seed=st.integers(0, 3),
    blocks=st.sampled_from([(4, 4), (3, 5), (8, 2), (1, 1), (32, 32), (5, 1), (48, 40)]),
    lengths=st.sampled_from([(Q_LEN, KV_LEN), (1, KV_LEN), (Q_LEN, 1), (16, 16), (64, 40)]),
    xp=st.sampled_from([np, torch]),
    workspace=st.sampled_from([1, 2**12, 2**26]),
)
def test_map_equals_brute_force(
    mask: Expr, seed: int, blocks: tuple[int, int], lengths: tuple[int, int], xp: Any, workspace: int
) -> None:
    values = capture_values(seed)
    converted = [xp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]
    sizes = {"batch": BATCH, "heads": HEADS, "block_q": blocks[0], "block_kv": blocks[1]}
    block_map = build(mask, converted, *lengths, xp=xp, workspace=workspace, **sizes)
    check_form(block_map)
    expected = brute_kinds(dense_mask(mask, values, (BATCH, HEADS, *lengths)), *blocks)
    np.testing.assert_array_equal(kinds_of(block_map, BATCH, HEADS), expected)
    check_form(block_map.transpose())
    np.testing.assert_array_equal(kinds_of(block_map.transpose(), BATCH, HEADS), expected.swapaxes(2, 3))
    assert sum(block_map.decided.values()) == block_map.grid.tiles


@pytest.mark.parametrize("xp", [np, torch])
@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "counts"),
    [
        (CAUSAL, 8192, 8192, (4032, 128, 4032)),
        (window(1024), 8192, 8192, (7112, 240, 840)),
        (TRUE, 1000, 1000, (0, 8, 120)),
        (FALSE, 1000, 1000, (128, 0, 0)),
        (CAUSAL, 0, 100, (0, 0, 0)),
        (CAUSAL, 100, 0, (0, 0, 0)),
        (CAUSAL, 1_048_576, 1_048_576, (67_100_672, 16_384, 67_100_672)),
    ],
)
def test_counts(mask: Expr, q_len: int, kv_len: int, counts: tuple[int, int, int], xp: Any) -> None:
    block_map = build(mask, [], q_len, kv_len, xp=xp)
    assert block_map.counts() == counts
    assert len(block_map.runs) <= 3 * block_map.rows
    assert block_map.transpose().counts() == counts


def test_coarse_tiles_agree_with_single_ones() -> None:
    """A grid large enough to start coarse, against the same mask decided row by row."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 40, 9001)).astype(np.int32)
    mask = logic(Op.AND, same(0), window(3000))
    block_map = build(mask, [ids], 9001, 9001, block_q=16, block_kv=32)
    check_form(block_map)
    expected = brute_kinds(dense_mask(mask, [ids], (1, 1, 9001, 9001)), 16, 32)
    np.testing.assert_array_equal(block_map.kinds(), expected[0, 0])
    assert block_map.decided["exact"] == 0


def test_overhang_is_never_full() -> None:
    block_map = build(TRUE, [], 100, 100, block_q=64, block_kv=64)
    assert np.asarray(block_map.kinds()).tolist() == [[2, 1], [2, 1]]
    aligned = build(TRUE, [], 100, 128, block_q=64, block_kv=64)
    assert np.asarray(aligned.kinds()).tolist() == [[2, 2], [2, 2]]


def test_batch_and_heads_only_where_read() -> None:
    sizes = {"batch": 4, "heads": 5, "block_q": 16, "block_kv": 16}
    assert (lambda m: (m.batch, m.heads))(build(CAUSAL, [], 64, 64, **sizes)) == (1, 1)
    mask = logic(Op.AND, CAUSAL, EVEN)
    block_map = build(mask, [], 64, 64, **sizes)
    assert (block_map.batch, block_map.heads) == (4, 1)
    expected = brute_kinds(dense_mask(mask, [], (4, 5, 64, 64)), 16, 16)
    np.testing.assert_array_equal(kinds_of(block_map, 4, 5), expected)
    np.testing.assert_array_equal(kinds_of(block_map.expand(4, 5), 4, 5), expected)


def test_dense_captured_mask() -> None:
    rng = np.random.default_rng(1)
    dense = np.zeros((2, 3, 200, 300), bool)
    for b in range(2):
        for h in range(3):
            for top, left in rng.integers(0, 180, (4, 2)):
                dense[b, h, top : top + 70, left : left + 90] = True
    mask = load(0, (B, H, Q, KV), DType.BOOL)
    block_map = build(mask, [dense], 200, 300, batch=2, heads=3, block_q=16, block_kv=16)
    np.testing.assert_array_equal(kinds_of(block_map, 2, 3), brute_kinds(dense, 16, 16))


def test_intervals_decide_real_masks() -> None:
    """Only tiles on an edge are sampled, none is evaluated: the analysis is tight on what people write."""
    ids = np.repeat(np.arange(16, dtype=np.int32), 256)
    for mask, values in [(CAUSAL, []), (window(512), []), (logic(Op.AND, same(0), CAUSAL), [ids])]:
        block_map = build(mask, values, 4096, 4096)
        assert block_map.decided["exact"] == 0
        assert block_map.decided["sample"] == block_map.counts()[1]


def kind_arrays() -> st.SearchStrategy[Array]:
    def make(seed: int, batch: int, heads: int) -> Array:
        rng = np.random.default_rng(seed)
        kinds = rng.choice(3, (batch, heads, 5, 7), p=[0.5, 0.2, 0.3]).astype(np.uint8)
        kinds[..., -1] = np.minimum(kinds[..., -1], 1)
        return kinds

    return st.builds(make, st.integers(0, 10**6), st.sampled_from([1, 2]), st.sampled_from([1, 3]))


SIZES = {"q_len": 33, "kv_len": 50, "block_q": 8, "block_kv": 8}


@settings(max_examples=60, deadline=None)
@given(one=kind_arrays(), two=kind_arrays(), xp=st.sampled_from([np, torch]))
def test_algebra_of_maps(one: Array, two: Array, xp: Any) -> None:
    maps = [from_kinds(xp.asarray(kinds), **SIZES) for kinds in (one, two)]
    for kinds, block_map in zip((one, two), maps, strict=True):
        check_form(block_map)
        np.testing.assert_array_equal(kinds_of(block_map, *kinds.shape[:2]), kinds)
        assert block_map.counts() == tuple(int((kinds == kind).sum()) for kind in range(3))
        assert block_map.sparsity() == pytest.approx(100 * (kinds == 0).mean())
        twice = block_map.transpose().transpose()
        np.testing.assert_array_equal(np.asarray(twice.runs), np.asarray(block_map.runs))
        np.testing.assert_array_equal(np.asarray(twice.offsets), np.asarray(block_map.offsets))
    both = maps[0].intersect(maps[1])
    check_form(both)
    expected = np.minimum(one, two)
    np.testing.assert_array_equal(kinds_of(both, *expected.shape[:2]), expected)


def test_select_reorders_and_repeats() -> None:
    kinds = np.random.default_rng(0).integers(0, 2, (2, 3, 5, 7)).astype(np.uint8)
    picked = from_kinds(kinds, **SIZES).select([1, 0, 1], [2, -1])
    np.testing.assert_array_equal(kinds_of(picked, 3, 2), kinds[[1, 0, 1]][:, [2, 2]])


def test_maps_that_do_not_fit_are_refused() -> None:
    block_map = from_kinds(np.ones((2, 3, 5, 7), np.uint8), **SIZES)
    with pytest.raises(InternalError, match="batch 2 of 2"):
        block_map.select([2], [0])
    with pytest.raises(InternalError, match="tiles for 33 x 50"):
        from_kinds(np.ones((1, 1, 5, 6), np.uint8), **SIZES)
    with pytest.raises(InternalError, match="3 and 2 heads"):
        block_map.intersect(from_kinds(np.ones((2, 2, 5, 7), np.uint8), **SIZES))
    with pytest.raises(InternalError, match="kv_len 50 and 49"):
        block_map.intersect(from_kinds(np.ones((2, 3, 5, 7), np.uint8), **(SIZES | {"kv_len": 49})))


def test_float_mask_with_captured_slopes() -> None:
    slopes = np.array([0.5, -0.25, 1e-3], np.float32)
    distance = cast(binary(Op.SUB, Q, KV), DType.F32)
    mask = compare(Op.LT, binary(Op.MUL, load(0, (H,), DType.F32), distance), const(10.0))
    block_map = build(mask, [slopes], 200, 200, heads=3, block_q=16, block_kv=16)
    expected = brute_kinds(dense_mask(mask, [slopes], (1, 3, 200, 200)), 16, 16)
    np.testing.assert_array_equal(kinds_of(block_map, 1, 3), expected)
