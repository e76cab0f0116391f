"""Stretches list the same tiles as the runs that they are made from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flexc.ir.blockmap import TileKind, from_kinds
from flexc.ir.stretches import stretches


@given(kinds=arrays(np.uint8, (2, 1, 3, 9), elements=st.integers(0, 2)))
def test_the_same_tiles(kinds: np.ndarray) -> None:
    block_map = from_kinds(kinds, q_len=48, kv_len=144, block_q=16, block_kv=16)
    offsets, walk = stretches(block_map)
    assert offsets.dtype == walk.dtype == np.int32
    rows = kinds.reshape(-1, 9)
    for row, (begin, end) in enumerate(pairwise(offsets)):
        seen = np.zeros(9, np.uint8)
        for first, full_first, full_end, last in walk[begin:end]:
            assert first <= full_first <= full_end <= last
            seen[first:last] = TileKind.PARTIAL
            seen[full_first:full_end] = TileKind.FULL
        assert np.array_equal(seen, rows[row])


def test_a_sliding_window_is_one_stretch_a_row() -> None:
    row = [0, 1, 2, 2, 1, 0]
    kinds = np.array([row, row], np.uint8)[None, None]
    offsets, walk = stretches(from_kinds(kinds, q_len=32, kv_len=96, block_q=16, block_kv=16))
    assert offsets.tolist() == [0, 1, 2]
    assert walk.tolist() == [[1, 2, 4, 5]] * 2
