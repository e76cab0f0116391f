"""How many tiles of keys a tile of rows sees under masks that are narrow bands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.codegen.bands import BAND_TILE, Band, band_of
from flexc.codegen.hopper_narrow import for_narrow_band
from flexc.codegen.hopper_plan import make_hopper_plan
from flexc.codegen.target import TARGETS
from flexc.codegen.tiles import Tiles
from flexc.resolve import resolve
from tests.codegen.generate import spec_for

Mask = Callable[..., Any]
starts = torch.tensor([3, 70, 140])
offset = 37


def _near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx <= 64) & (kv_idx - q_idx <= 70)


def _moved_by_a_number(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + offset >= kv_idx) & (q_idx + offset - kv_idx < 128)


def _moved_by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = q_idx + starts[b]
    return (row >= kv_idx) & (row - kv_idx < 100)


def _far_before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx >= 100) & (q_idx - kv_idx < 190)


def _window_of_chunks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128) & (q_idx // 80 == kv_idx // 80)


MASKS: dict[str, Mask] = {
    "window_1": masks.sliding_window(1),
    "window_65": masks.sliding_window(65),
    "window_128": masks.sliding_window(128),
    "window_129": masks.sliding_window(129),
    "window_130": masks.sliding_window(130),
    "window_300": masks.sliding_window(300),
    "both_sides": _near,
    "moved_by_a_number": _moved_by_a_number,
    "moved_by_batch": _moved_by_batch,
    "far_before": _far_before,
    "window_of_chunks": _window_of_chunks,
    "chunks": masks.chunked(100),
}


def _band(mask: Mask, lengths: tuple[int, int] | None = None) -> Band | None:
    mods, values, _ = resolve(None, mask)
    return band_of(mods.mask, values, lengths)


def _tiles(mask: Mask) -> int:
    band = _band(mask)
    assert band is not None
    return band.tiles


def _tiles_of(seen: torch.Tensor) -> range:
    """The tiles from the first key that any of some rows sees to the last one."""
    keys = seen.any(0).nonzero()
    return range(0) if not len(keys) else range(int(keys[0]) // BAND_TILE, int(keys[-1]) // BAND_TILE + 1)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(640, 640), (300, 640), (640, 200)])
def test_no_rows_see_more(name: str, lengths: tuple[int, int]) -> None:
    rows, columns = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None, :]
    seen = MASKS[name](torch.tensor(1), torch.tensor(0), rows, columns)
    usual, known = _band(MASKS[name]), _band(MASKS[name], lengths)
    assert usual is not None
    assert known is not None
    assert usual.tiles >= known.tiles >= max(len(_tiles_of(part)) for part in seen.split(BAND_TILE))
    assert usual.keys >= known.keys >= int(seen.sum(1).max())


def test_no_more_than_needed() -> None:
    assert [_tiles(masks.sliding_window(w)) for w in (1, 65, 66, 129, 130, 257)] == [1, 2, 3, 3, 4, 5]
    assert _tiles(masks.sliding_window(2**20)) > 16000
    assert _band(masks.sliding_window(130)) == (4, 130, True)


@pytest.mark.parametrize(
    "mask", [masks.causal, ~masks.causal, masks.prefix_lm(10), masks.natten2d(32, 48, 7)]
)
def test_what_is_no_band_has_no_number(mask: Mask) -> None:
    assert _band(mask) is None


def _planned(mask: Mask, **facts: Any) -> tuple[bool, int]:
    """Whether a spec is taken for narrow, and the keys of its tiles."""
    _, values, _ = resolve(facts.get("score"), mask)
    spec = for_narrow_band(spec_for(mask, **facts), values, None, {})
    return spec.narrow > 0, make_hopper_plan(spec, TARGETS["sm90"]).tiles.block_kv


@pytest.mark.parametrize(("width", "keys"), [(1, 64), (128, 64), (257, 64), (258, 128), (4096, 128)])
def test_narrow_windows_of_wide_heads_have_narrow_tiles(width: int, keys: int) -> None:
    assert _planned(masks.sliding_window(width), head_dim=128) == (keys == 64, keys)


@pytest.mark.parametrize(
    ("mask", "facts"),
    [
        (masks.sliding_window(300), {"head_dim": 64}),
        (masks.sliding_window(128), {"head_dim": 256}),
        (masks.sliding_window(128), {"score": scores.softcap(30.0)}),
        (masks.sliding_window(128), {"dropout": True}),
        (masks.causal, {}),
    ],
    ids=["wider_window_of_narrow_heads", "widest_heads", "soft_cap", "dropout", "no_band"],
)
def test_other_calls_keep_their_tiles(mask: Mask, facts: dict[str, Any]) -> None:
    assert not _planned(mask, **facts)[0]


def _three_ends(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128) & (kv_idx > q_idx - offset * h)


def _of_a_tensor(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128) & (kv_idx >= starts[b])


@pytest.mark.parametrize(
    ("mask", "stages"),
    [
        (masks.sliding_window(128), 3),
        (lambda b, h, q_idx, kv_idx: q_idx == kv_idx, 2),
        (masks.sliding_window(129), 4),
        (masks.sliding_window(64), 2),
        (masks.sliding_window(256), 5),
        (masks.sliding_window(257), 0),
        (_near, 4),
        (_far_before, 3),
        (_moved_by_a_number, 4),
        (_three_ends, 0),
        (_of_a_tensor, 0),
        (masks.causal, 0),
    ],
)
def test_few_keys_of_narrow_heads_are_walked_along(mask: Mask, stages: int) -> None:
    _, values, _ = resolve(None, mask)
    for facts in ({}, {"head_dim_v": 48}, {"return_lse": True, "has_sinks": True}):
        spec = for_narrow_band(spec_for(mask, head_dim=64, **facts), values, None, {})
        plan = make_hopper_plan(spec, TARGETS["sm90"])
        assert (spec.walk, plan.walks) == (stages, stages > 0)
        assert not plan.walks or plan.tiles == Tiles(64, 64, 4, stages)
    cap = scores.softcap(30.0)
    assert for_narrow_band(spec_for(mask, cap, head_dim=64), resolve(cap, mask)[1], None, {}).walk == stages
    assert not for_narrow_band(spec_for(mask, head_dim=64, dropout=True), values, None, {}).walk
    usual = spec_for(mask, head_dim=64)
    assert not for_narrow_band(usual, values, None, {"block_q": 64, "num_stages": 3}).walk


@pytest.mark.parametrize(("width", "is_narrow"), [(257, True), (258, False)])
def test_wider_windows_of_narrow_heads_are_short(width: int, is_narrow: bool) -> None:
    mask = masks.sliding_window(width)
    _, values, _ = resolve(None, mask)
    spec = for_narrow_band(spec_for(mask, head_dim=64), values, None, {})
    plan = make_hopper_plan(spec, TARGETS["sm90"])
    assert (spec.narrow, plan.short, plan.turns) == (is_narrow, is_narrow, not is_narrow)


@pytest.mark.parametrize(
    ("mask", "is_steady"),
    [
        (masks.sliding_window(128), True),
        (_near, True),
        (_moved_by_a_number, True),
        (lambda b, h, q_idx, kv_idx: q_idx // 64 == kv_idx // 64, False),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - q_idx % 100 <= kv_idx), False),
    ],
    ids=["window", "near", "moved", "blocks", "from_a_block_on"],
)
def test_bands_that_move_on_by_a_key_are_steady(mask: Mask, is_steady: bool) -> None:
    band = _band(mask)
    assert (band is not None and band.steady) == is_steady


def test_who_asks_for_tiles_gets_them() -> None:
    mask = masks.sliding_window(128)
    _, values, _ = resolve(None, mask)
    spec = spec_for(mask)
    assert for_narrow_band(spec, values, None, {"fast_tanh": True}).narrow
    assert for_narrow_band(spec, values, None, {"block_kv": 128}) is spec
    assert not for_narrow_band(spec, (4096,), None, {}).narrow


def test_explain_says_why() -> None:
    mask = masks.sliding_window(128)
    _, values, _ = resolve(None, mask)
    plan = make_hopper_plan(for_narrow_band(spec_for(mask), values, None, {}), TARGETS["sm90"])
    assert "block_kv = 64: rows see few keys" in plan.explain()
    narrow_heads = for_narrow_band(spec_for(mask, head_dim=64), values, None, {})
    explained = make_hopper_plan(narrow_heads, TARGETS["sm90"]).explain()
    assert "walks = True: rows see few keys" in explained
    assert "num_stages = 3: tiles of keys that 64 rows see" in explained
    assert "consumers" not in explained
