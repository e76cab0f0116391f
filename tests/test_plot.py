"""Pictures: right pixels, and a bounded cost."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexc
from flexc import plot
from flexc.errors import MissingPackage, ShapeMismatch, UnknownOption


def pixels(figure: Any) -> Any:
    (image,) = figure.axes[0].get_images()
    return np.asarray(image.get_array())


def test_pairs() -> None:
    figure = flexc.masks.causal.plot(5, 7)
    assert np.array_equal(pixels(figure), np.tril(np.ones((5, 7))))
    assert "15 of" not in figure.axes[0].get_title()
    assert "42.9% of 35 pairs" in figure.axes[0].get_title()


def test_tiles() -> None:
    figure = flexc.masks.causal.plot(64, 64, block=True, block_size=16)
    assert np.array_equal(pixels(figure), np.tril(np.full((4, 4), 2), -1) + np.eye(4))
    assert "6 empty, 4 partial, 6 full" in figure.axes[0].get_title()


def test_batch_and_head() -> None:
    @flexc.mask_mod
    def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (b == 1) & (h == 2) & (q_idx >= kv_idx)

    assert pixels(odd.plot(4, 4)).sum() == 0
    assert pixels(odd.plot(4, 4, b=1, h=2)).sum() == 10


def test_a_long_mask_is_drawn_by_tiles_at_bounded_cost() -> None:
    tracemalloc.start()
    figure = flexc.masks.sliding_window(4096).plot(1_000_000, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20
    drawn = pixels(figure)
    assert drawn.shape == (489, 489, 3)
    assert max(drawn.shape) <= plot.MAX_CELLS
    background = drawn[0, -1]
    visited = (drawn != background).any(-1)
    rows, columns = np.nonzero(visited)
    assert (rows >= columns).all()
    assert set((rows - columns).tolist()) == {0, 1, 2}
    assert visited.diagonal().all()
    assert "16 x 16 tiles" in figure.axes[0].get_title()


def test_a_cell_of_several_tiles_has_their_mean_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "MAX_CELLS", 2)
    figure = flexc.masks.causal.plot(64, 64, block=True, block_size=16)
    drawn = pixels(figure)
    assert drawn.shape == (2, 2, 3)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    masked, _, allowed = (np.asarray(patch.get_facecolor()[:3]) for patch in legend.get_patches())
    assert np.allclose(drawn[0, 1], masked)
    assert np.allclose(drawn[1, 0], allowed)
    assert not np.allclose(drawn[0, 0], masked)
    assert not np.allclose(drawn[0, 0], allowed)


def test_empty() -> None:
    assert not flexc.masks.causal.plot(0, 5).axes[0].get_images()


def test_into_given_axes(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert flexc.masks.causal.plot(8, 8, ax=left) is figure
    assert flexc.masks.causal.plot(8, 8, ax=right, block=True) is figure
    figure.savefig(tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 1000


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShapeMismatch, match="Q_LEN is -1"):
        flexc.masks.causal.plot(-1, 5)
    with pytest.raises(UnknownOption, match="block_size is 0"):
        flexc.masks.causal.plot(5, 5, block_size=0)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match="pip install"):
        flexc.masks.causal.plot(5, 5)
