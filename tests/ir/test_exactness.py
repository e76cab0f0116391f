"""Block maps are exact: 2,000 random masks against brute force, tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexc.ir import classify
from flexc.ir.expr import Expr
from tests.ir.expressions import BATCH, HEADS, booleans, capture_values
from tests.ir.test_blockmap import brute_kinds, build, dense_mask, kinds_of

EXAMPLES = 400
GRIDS = [  # block sizes, lengths that are no multiples of them, and how many tiles may be decided at first
    ((16, 16), (37, 50), classify._COARSEST),
    ((20, 48), (90, 101), classify._COARSEST),
    ((128, 32), (131, 70), classify._COARSEST),
    ((64, 128), (65, 200), classify._COARSEST),
    ((8, 5), (100, 90), 1),
]


@pytest.mark.parametrize(("blocks", "lengths", "coarsest"), GRIDS, ids=str)
def test_every_tile_is_what_its_pairs_say(
    blocks: tuple[int, int], lengths: tuple[int, int], coarsest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full tile is full, an empty one empty, and a partial one neither."""
    monkeypatch.setattr(classify, "_COARSEST", coarsest)
    kinds_seen: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mask=booleans(4), seed=st.integers(0, 3))
    def check(mask: Expr, seed: int) -> None:
        values: list[Any] = capture_values(seed)
        sizes = {"batch": BATCH, "heads": HEADS, "block_q": blocks[0], "block_kv": blocks[1]}
        block_map = build(mask, values, *lengths, **sizes)
        expected = brute_kinds(dense_mask(mask, values, (BATCH, HEADS, *lengths)), *blocks)
        np.testing.assert_array_equal(kinds_of(block_map, BATCH, HEADS), expected)
        kinds_seen.update(expected.reshape(-1).tolist())

    check()
    assert kinds_seen == {0, 1, 2}
