"""Maps from afar against dense arrays of tiles."""

from __future__ import annotations

import numpy as np
import pytest

from flexc.ir.blockmap import from_kinds
from flexc.ir.overview import overview


@pytest.mark.parametrize("cells", [(1, 1), (2, 3), (5, 7), (100, 4), (-1, -1)])
def test_cells_count_their_tiles(cells: tuple[int, int]) -> None:
    kinds = np.random.default_rng(0).choice(3, (2, 3, 13, 17), p=[0.4, 0.3, 0.3]).astype(np.uint8)
    kinds[..., -1] = np.minimum(kinds[..., -1], 1)
    block_map = from_kinds(kinds, q_len=13 * 16, kv_len=17 * 16 - 3, block_q=16, block_kv=16)
    for b, h in np.ndindex(2, 3):
        seen = overview(block_map, *cells, b=b, h=h)
        assert seen.tiles.sum() == 13 * 17
        for r, c in np.ndindex(*seen.tiles.shape):
            cell = kinds[b, h, r * seen.row_step :, c * seen.column_step :]
            cell = cell[: seen.row_step, : seen.column_step]
            assert seen.tiles[r, c] == cell.size
            assert seen.partial[r, c] == (cell == 1).sum()
            assert seen.full[r, c] == (cell == 2).sum()


def test_a_map_without_tiles() -> None:
    empty = from_kinds(np.zeros((1, 1, 0, 3), np.uint8), q_len=0, kv_len=40, block_q=16, block_kv=16)
    assert overview(empty, 20, 20).tiles.shape == (0, 3)
