"""What generated Hopper forwards compute, and that no role waits for ever: run in `gluon_in_numpy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from flexc import BlockMask, masks, scores
from flexc.codegen import hopper_plan
from flexc.codegen.arguments import Argument, Source
from flexc.codegen.design import Design
from flexc.codegen.hopper_narrow import for_narrow_band
from flexc.codegen.pipeline import lower
from flexc.codegen.target import TARGETS
from flexc.codegen.tiles import Tiles
from flexc.ir.spec import Blocks
from flexc.pack_backward import map_operands
from flexc.resolve import resolve
from tests.codegen.generate import spec_for
from tests.gluon_in_numpy import SMALL_PRODUCTS, Descriptor, run
from tests.gradients import problem
from tests.oracle import golden

Mod = Callable[..., Any]
DIM = 64


@dataclass(frozen=True)
class Case:
    """A call, and how its kernel differs from the one that would be planned."""

    mask: Mod | None = None
    score: Mod | None = None
    lengths: tuple[int, int] = (300, 333)
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    unseen: int | None = None
    """From this key on, no row sees anything: keys and values are NaN."""
    sinks: bool = False
    bounded: bool = False
    """The soft cap's number is known to be small."""
    narrow: bool = False
    """The band is known to be of few keys."""
    larger: float = 1.0
    """How much larger queries are."""
    late: float = 1.0
    """How much larger the keys from the middle on are."""
    early: float = 1.0
    """How much larger those before are."""
    values: float = 1.0
    """How much larger values are, which are positive then: their sums become infinite, not NaN."""
    packed: tuple[int, int] | None = None
    """Rows of each head in a tile, and the heads."""
    mapped: bool = False
    """The kernel walks a block map."""
    tiles: Tiles | None = None
    parts: int = 0
    """How many programs walk along each head; 0: the kernel is one whose programs have roles."""
    plan: dict[str, Any] = field(default_factory=dict)


def _later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + 50 < kv_idx


def _not_before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx <= kv_idx


def _from_a_key_on(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= 150) & (kv_idx - q_idx < 20)


def _keys_of_a_number(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= 100) & (kv_idx < 290)


def _bias(width: int) -> Mod:
    """One for each distance of two heads, of which the farther ones share the last."""
    return scores.relative_bias(torch.linspace(-4.0, 4.0, 2 * width).sin().reshape(2, width) * 3.0)


table = torch.linspace(-4.0, 4.0, 901).cos()


def _bias_of_both_kinds(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + table[(kv_idx - q_idx + 500).clamp(0, 900)] - 0.01 * (q_idx - kv_idx).abs() - q_idx * 0.125


def _slope_of_a_number(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (score - 0.05 * (q_idx - kv_idx)) * 1.5


def _last_and_first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 128) | (kv_idx < 64))


def _late_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx + 270


def _documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Of 50, in both directions: rows of a tile see none of its first keys."""
    return q_idx // 50 == kv_idx // 50


ids = (torch.arange(450)[None] // torch.tensor([[50], [190]])).int()
padded_ids = torch.where(torch.arange(450) < 270, ids, -1)


def _packed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Of 50 tokens in the first batch, of 190 in the second."""
    return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])


def _packed_both_ways(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ids[b, q_idx] == ids[b, kv_idx]


def _padded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The last 180 rows see nothing, and nobody sees them."""
    both = padded_ids[b, q_idx] == padded_ids[b, kv_idx]
    return (q_idx >= kv_idx) & both & (padded_ids[b, q_idx] >= 0)


def _few_rows_see(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 70) & (q_idx % 3 == 0)


def _keys_before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx >= 70) & (q_idx - kv_idx < 128)


def _keys_after(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= q_idx) & (kv_idx < q_idx + 65)


def _near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx <= 64) & (kv_idx - q_idx <= 70)


def _window_before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx + 37) & (q_idx < kv_idx + 165)


def _of_pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * torch.where(kv_idx % 3 == 0, 0.5, -1.0) - (q_idx - kv_idx).abs() * 0.125 * h


def _window_of_64(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 64)


def _window_of_256(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 256)


def _window_of_100(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)


def _window_of_a_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx + h % 2) & (q_idx - kv_idx < 100)


def _window_of_two_starts(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128) & (kv_idx > q_idx - 37 * h)


def _window_from_a_key_on(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128) & (kv_idx >= 100)


WINDOW = masks.sliding_window(128)
CAP = scores.softcap(30.0)
SLOPES = scores.alibi(torch.linspace(0.01, 0.5, 12))
ALIBI = scores.alibi(torch.tensor([0.5, 0.25, 0.1, -0.1, 0.2, 0.05, 0.3, 0.01]))
STEEP = scores.alibi(torch.tensor([1.0, -1.0, 3.0, -3.0]))
LAZY = {"lazy_max": True, "sums_in_parts": True}
WIDE = Tiles(192, 128, 4, 4)
CASES = {
    "none": Case(),
    "causal": Case(masks.causal),
    "one_row_in_the_last_tile": Case(masks.causal, lengths=(385, 385)),
    "two_warpgroups_without_rows": Case(masks.causal, lengths=(449, 449), batch=2),
    "few_rows": Case(masks.causal, lengths=(10, 70)),
    "few_keys": Case(masks.causal, lengths=(700, 200), heads=(4, 2)),
    "window": Case(WINDOW, lengths=(700, 700)),
    "window_of_few_keys": Case(WINDOW, lengths=(500, 150)),
    "narrow_window": Case(WINDOW, lengths=(700, 700), narrow=True),
    "narrow_window_of_few_keys": Case(WINDOW, lengths=(500, 150), narrow=True),
    "narrow_window_far_too_low": Case(WINDOW, lengths=(450, 450), narrow=True, larger=60.0),
    "unseen_values_of_a_narrow_window": Case(WINDOW, unseen=310, narrow=True),
    "prefix": Case(masks.prefix_lm(100)),
    "keys_after": Case(_later),
    "keys_from_the_diagonal_on": Case(_not_before, lengths=(449, 449)),
    "from_a_key_on": Case(_from_a_key_on, lengths=(449, 449)),
    "keys_of_a_number": Case(_keys_of_a_number),
    "soft_cap": Case(masks.causal, CAP, heads=(4, 2), batch=2),
    "slopes": Case(masks.causal, ALIBI, heads=(4, 2), batch=2),
    "slopes_far_from_the_start": Case(masks.causal, ALIBI, lengths=(70, 900)),
    "slopes_where_values_are_unseen": Case(masks.causal, ALIBI, heads=(4, 2), unseen=300),
    "slopes_in_narrow_tiles": Case(WINDOW, ALIBI, lengths=(449, 449), tiles=Tiles(128, 64, 4, 4)),
    "bias": Case(score=_bias(665)),
    "bias_causal": Case(masks.causal, _bias(665), lengths=(333, 333), batch=2),
    "bias_of_few_distances": Case(WINDOW, _bias(33), lengths=(700, 700)),
    "bias_of_few_rows": Case(score=_bias(999), lengths=(70, 500), plan={"sums_in_parts": False}),
    "bias_in_narrow_tiles": Case(masks.causal, _bias(999), lengths=(449, 449), tiles=Tiles(192, 64, 4, 4)),
    "bias_and_a_slope": Case(masks.prefix_lm(100), _bias_of_both_kinds, lengths=(300, 300)),
    "bias_of_two_stretches": Case(_last_and_first, _bias(999), lengths=(500, 500)),
    "bias_where_values_are_unseen": Case(masks.causal, _bias(665), unseen=310),
    "sinks": Case(masks.causal, heads=(4, 2), sinks=True),
    "sinks_alone": Case(sinks=True),
    "unseen_values": Case(masks.causal, unseen=300),
    "unseen_values_of_a_window": Case(WINDOW, unseen=310),
    "unseen_values_under_a_soft_cap": Case(masks.causal, CAP, unseen=300),
    "soft_cap_in_wide_tiles": Case(masks.causal, CAP, tiles=WIDE),
    "bounded": Case(masks.causal, CAP, heads=(4, 2), batch=2, bounded=True),
    "bounded_far_from_zero": Case(masks.causal, CAP, lengths=(450, 450), bounded=True, larger=30.0),
    "bounded_large_values": Case(masks.causal, CAP, (450, 450), bounded=True, larger=30.0, values=1e25),
    "bounded_in_a_window": Case(WINDOW, CAP, lengths=(450, 450), bounded=True, larger=10.0),
    "bounded_in_wide_tiles": Case(masks.prefix_lm(100), CAP, bounded=True, tiles=WIDE),
    "bounded_in_two_stretches": Case(_last_and_first, CAP, lengths=(500, 500), bounded=True),
    "bounded_keys_after": Case(_later, CAP, bounded=True),
    "bounded_unseen_values": Case(masks.causal, CAP, unseen=300, bounded=True),
    "bounded_whole_sums": Case(masks.causal, CAP, bounded=True, plan={"sums_in_parts": False}),
    "bounded_by_threads": Case(masks.causal, CAP, unseen=300, bounded=True, tiles=WIDE, plan={"lean": True}),
    "guessed_slopes": Case(masks.causal, ALIBI, (450, 450), heads=(4, 2), tiles=WIDE),
    "guessed_steep_slopes": Case(masks.causal, STEEP, (450, 450), heads=(4, 2), tiles=WIDE),
    "guessed_slopes_of_a_number": Case(masks.causal, _slope_of_a_number, (450, 450), tiles=WIDE),
    "guessed_slopes_in_two_stretches": Case(_last_and_first, ALIBI, (500, 500)),
    "guessed_slopes_of_unseen_values": Case(masks.causal, ALIBI, unseen=300, tiles=WIDE),
    "guessed_slopes_by_keys_unseen": Case(_documents, ALIBI, (450, 450), tiles=WIDE),
    "guessed_steep_slopes_by_keys_unseen": Case(_documents, STEEP, (450, 450), tiles=WIDE, late=40.0),
    "guessed_steep_slopes_in_a_window": Case(WINDOW, STEEP, (450, 450), tiles=WIDE),
    "guessed_far_too_low": Case(masks.causal, lengths=(450, 450), larger=60.0, tiles=WIDE),
    "guessed_of_large_scores": Case(masks.causal, lengths=(450, 450), larger=20.0, tiles=WIDE),
    "guessed_of_growing_scores": Case(masks.causal, lengths=(450, 450), early=100.0, tiles=WIDE),
    "guessed_slopes_of_large_scores": Case(
        masks.causal, STEEP, (450, 450), heads=(4, 2), larger=60.0, tiles=WIDE
    ),
    "guessed_by_keys_unseen": Case(_documents, lengths=(450, 450), tiles=WIDE),
    "guessed_by_large_keys_unseen": Case(_documents, lengths=(450, 450), tiles=WIDE, late=40.0),
    "guessed_by_small_keys_unseen": Case(_documents, lengths=(450, 450), tiles=WIDE, early=40.0),
    "guessed_where_rows_see_nothing": Case(_few_rows_see, lengths=(450, 450), tiles=WIDE),
    "map": Case(_packed, lengths=(450, 450), heads=(4, 2), batch=2, mapped=True),
    "map_of_whole_sums": Case(
        _packed, lengths=(450, 450), batch=2, mapped=True, plan={"sums_in_parts": False}
    ),
    "map_in_narrow_tiles": Case(
        _packed_both_ways, lengths=(450, 450), batch=2, mapped=True, tiles=Tiles(128, 64, 4, 4)
    ),
    "map_of_two_stretches": Case(_last_and_first, lengths=(500, 500), mapped=True),
    "map_far_too_low": Case(_packed, lengths=(450, 450), batch=2, larger=60.0, mapped=True),
    "map_of_two_stretches_far_too_low": Case(_last_and_first, lengths=(500, 500), larger=60.0, mapped=True),
    "map_by_large_keys_unseen": Case(_packed_both_ways, lengths=(450, 450), batch=2, mapped=True, late=40.0),
    "map_by_small_keys_unseen": Case(_packed_both_ways, lengths=(450, 450), batch=2, mapped=True, early=40.0),
    "map_where_rows_see_nothing": Case(_padded, lengths=(450, 450), batch=2, mapped=True),
    "map_of_unseen_values": Case(_padded, lengths=(450, 450), batch=2, mapped=True, unseen=270),
    "lazy_max": Case(plan=LAZY),
    "lazy_max_grows": Case(plan=LAZY, lengths=(300, 900), larger=30.0),
    "lazy_max_grows_in_other_orders": Case(plan=LAZY, lengths=(700, 400), heads=(4, 2), larger=300.0),
    "lazy_max_of_few_keys": Case(plan=LAZY, lengths=(300, 100)),
    "lazy_max_with_sinks": Case(plan=LAZY, sinks=True, larger=10.0),
    "sums_in_parts": Case(plan={"sums_in_parts": True}),
    "whole_sums": Case(masks.causal, lengths=(700, 700), plan={"sums_in_parts": False}),
    "whole_sums_under_a_soft_cap": Case(masks.causal, CAP, plan={"sums_in_parts": False}),
    "values_early": Case(masks.causal, lengths=(700, 700), plan={"values_late": False}),
    "values_late_in_a_window": Case(WINDOW, lengths=(700, 700), plan={"values_late": True}),
    "walk": Case(WINDOW, lengths=(700, 700), parts=3),
    "walk_of_a_tile": Case(masks.sliding_window(128), lengths=(640, 640), parts=10),
    "walk_of_few_keys": Case(WINDOW, lengths=(700, 150), heads=(4, 2), batch=2, parts=2),
    "walk_of_few_rows": Case(WINDOW, lengths=(130, 700), sinks=True, parts=5),
    "walk_past_rows_without_keys": Case(_keys_before, lengths=(450, 333), heads=(4, 1), parts=2),
    "walk_to_keys_after": Case(_keys_after, lengths=(450, 449), heads=(4, 2), sinks=True, parts=1),
    "walk_by_heads": Case(_window_of_a_head, lengths=(450, 450), heads=(4, 2), batch=2, parts=2),
    "walk_from_a_key_on": Case(_window_from_a_key_on, lengths=(450, 400), parts=2),
    "walk_of_two_starts": Case(_window_of_two_starts, lengths=(450, 450), heads=(4, 4), parts=2),
    "walk_of_four_tiles": Case(_near, lengths=(500, 449), heads=(4, 2), parts=2),
    "walk_moved_by_a_number": Case(_window_before, lengths=(450, 450), sinks=True, parts=2),
    "walk_with_cap": Case(_window_of_100, CAP, lengths=(333, 450), parts=2),
    "walk_with_slopes": Case(WINDOW, SLOPES, lengths=(333, 333), heads=(4, 2), sinks=True, parts=2),
    "walk_with_mod_of_pairs": Case(_near, _of_pairs, lengths=(333, 300), heads=(4, 2), parts=2),
    "walk_of_five_tiles": Case(_window_of_256, lengths=(500, 470), parts=2),
    "walk_of_two_tiles": Case(_window_of_64, lengths=(333, 300), heads=(4, 2), parts=2),
    "walk_of_narrow_rows": Case(_window_of_100, lengths=(400, 400), parts=2),
    "walk_past_unseen_values": Case(WINDOW, unseen=310, parts=2),
    "packed": Case(lengths=(20, 333), heads=(8, 2), batch=2, packed=(16, 4)),
    "packed_causal": Case(_late_rows, lengths=(50, 333), heads=(8, 2), batch=2, packed=(32, 4)),
    "packed_one_row": Case(_late_rows, lengths=(1, 333), heads=(8, 1), sinks=True, packed=(8, 8)),
    "packed_in_two_warpgroups": Case(_late_rows, lengths=(19, 333), heads=(8, 1), packed=(16, 8)),
    "packed_group_of_3": Case(_late_rows, lengths=(20, 333), heads=(6, 2), batch=2, packed=(16, 4)),
    "packed_slopes": Case(_late_rows, ALIBI, lengths=(20, 333), heads=(8, 2), packed=(32, 4)),
    "packed_slopes_of_3": Case(
        _late_rows, ALIBI, lengths=(50, 333), heads=(6, 2), sinks=True, packed=(16, 4)
    ),
    "packed_window": Case(WINDOW, lengths=(60, 150), heads=(8, 2), packed=(16, 4)),
    "packed_bounded": Case(WINDOW, CAP, lengths=(60, 60), heads=(6, 2), bounded=True, packed=(32, 4)),
    "packed_soft_cap": Case(WINDOW, CAP, lengths=(60, 60), heads=(6, 2), packed=(32, 4)),
    "packed_prefix": Case(masks.prefix_lm(100), lengths=(20, 333), heads=(8, 2), packed=(16, 4)),
    "packed_unseen_of_12": Case(
        _late_rows, SLOPES, (50, 350), (12, 1), unseen=320, sinks=True, packed=(8, 16)
    ),
    "packed_unseen_values": Case(_late_rows, ALIBI, (20, 333), (6, 2), batch=2, unseen=300, packed=(16, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    q, k, v = _tensors(case)
    sinks = torch.linspace(-1.0, 3.0, q.shape[1]) if case.sinks else None
    want = golden(q, k, v, mask_mod=case.mask, score_mod=case.score, sinks=sinks)
    if case.unseen is not None:
        k[:, :, case.unseen :], v[:, :, case.unseen :] = torch.nan, torch.nan
    out, lse = _run(case, q, k, v, sinks, monkeypatch)
    want.check(out, lse)


def test_keys_whose_scores_are_infinite_weigh_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last keys, which come first, rows have no largest score; others are far above that."""
    case = Case(plan=LAZY, lengths=(100, 500))
    q, k, v = _tensors(case)
    q[..., 0], k[:, :, 200:, 0] = q[..., 0].abs() + 1.0, -torch.inf
    out, lse = _run(case, q, k, v, None, monkeypatch)
    golden(q, k[:, :, :200], v[:, :, :200]).check(out, lse)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("score", [None, CAP], ids=["none", "soft_cap"])
def test_a_row_with_one_key_is_its_value(
    score: Mod | None, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(masks.causal, score, bounded=bounded and score is not None)
    q, k, v = _tensors(case)
    out, _ = _run(case, q, k, v, None, monkeypatch)
    assert torch.equal(out[:, :, 0], v[:, :, 0]), "its weight is 1, which no rounding changes"


@pytest.mark.parametrize(
    ("case", "again"),
    [
        (Case(masks.causal, tiles=WIDE), False),
        (Case(_documents, tiles=WIDE), False),
        (Case(_few_rows_see, tiles=WIDE), False),
        (Case(masks.causal, STEEP, heads=(4, 2), tiles=WIDE), False),
        (Case(masks.causal, tiles=WIDE, larger=60.0), False),
        (Case(masks.causal, tiles=WIDE, early=100.0), True),
        (Case(_padded, lengths=(450, 450), batch=2, mapped=True), False),
        (Case(_packed, lengths=(450, 450), batch=2, larger=60.0, mapped=True), False),
        (Case(_packed, lengths=(450, 450), batch=2, early=100.0, mapped=True), True),
    ],
    ids=[
        "causal",
        "documents",
        "rows_without_keys",
        "steep_slopes",
        "large",
        "far_too_low",
        "map",
        "map_large",
        "map_far_too_low",
    ],
)
def test_rows_are_computed_again_where_a_guess_fails(
    case: Case, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    SMALL_PRODUCTS.clear()
    q, k, v = _tensors(case)
    _run(case, q, k, v, None, monkeypatch)
    assert bool(SMALL_PRODUCTS) is again


@pytest.mark.parametrize("mask", [None, masks.causal, _documents], ids=["plain", "causal", "documents"])
def test_lists_that_leave_rows_without_keys(mask: Mod | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows see what both lists and mask allow: the first 128 nothing, though the mask alone lets them see."""
    case = Case(mask, lengths=(300, 333), heads=(2, 2))
    q, k, v = _tensors(case)
    indices = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 2, 1]], dtype=torch.int32)[None, None]
    counts = torch.tensor([0, 1, 2], dtype=torch.int32)[None, None]
    block_mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=128, mask_mod=mask, seq_lengths=(300, 333)
    )
    golden(q, k, v, mask_mod=mask, block_mask=block_mask).check(
        *_run(case, q, k, v, None, monkeypatch, block_mask)
    )


@pytest.mark.parametrize("early", [1.0, 100.0], ids=["unseen_values", "far_too_low"])
def test_rows_computed_again_see_what_lists_name(early: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows see keys before and after a block that their list leaves out and the mask allows."""
    case = Case(masks.causal, lengths=(300, 333), early=early)
    q, k, v = _tensors(case)
    indices = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 2, 1]], dtype=torch.int32)[None, None]
    counts = torch.tensor([1, 2, 2], dtype=torch.int32)[None, None]
    block_mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=128, mask_mod=masks.causal, seq_lengths=(300, 333)
    )
    want = golden(q, k, v, mask_mod=masks.causal, block_mask=block_mask)
    if early == 1.0:
        k[:, :, 300:], v[:, :, 300:] = torch.nan, torch.nan
    SMALL_PRODUCTS.clear()
    want.check(*_run(case, q, k, v, None, monkeypatch, block_mask))
    assert SMALL_PRODUCTS, "some rows are computed again"


def _tensors(case: Case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    (rows, keys), (q_heads, kv_heads) = case.lengths, case.heads
    shapes = ((q_heads, rows), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(case.batch, heads, n, DIM).bfloat16() for heads, n in shapes)
    middle = torch.arange(keys)[:, None] < keys // 2
    k = k * torch.where(middle, case.early, case.late).bfloat16()
    return q * case.larger, k, v if case.values == 1.0 else v.abs() * case.values


def _run(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
    block_mask: BlockMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    planned = hopper_plan._plan
    monkeypatch.setattr(hopper_plan, "_plan", lambda *a: replace(planned(*a), **case.plan))
    if case.tiles is not None:
        monkeypatch.setattr(hopper_plan, "_candidates", lambda *a: [case.tiles])
    mods, values, _ = resolve(case.score, case.mask)
    sources = mods.sources
    spec = spec_for(
        case.mask,
        case.score,
        head_dim=DIM,
        return_lse=True,
        has_sinks=sinks is not None,
        bounded=case.bounded,
        narrow=case.narrow,
        **({} if case.packed is None else {"few_rows": case.packed[0], "packed_heads": case.packed[1]}),
        **({"blocks": Blocks.MAP} if case.mapped else {}),
        **({} if block_mask is None else {"blocks": Blocks.MAP, "max_block_q": 128, "max_block_kv": 128}),
    )
    if case.parts:
        spec = for_narrow_band(spec, values, case.lengths, {})
        assert spec.walk
    generated = lower(spec, TARGETS["sm90"], sources=sources, design=Design.HOPPER)
    keys = generated.plan.tiles.block_kv
    arrays = {"q": q, "k": k, "v": v, "out": torch.full_like(q, 7.0)}
    tensors = {name: tensor.float().numpy() for name, tensor in arrays.items()}
    lse = np.full(q.shape[:3], 7.0, np.float32)
    counters = np.zeros(2, np.int32)
    known: dict[str, Any] = {
        "c": 30.0,
        "W": 128,
        "P": 100,
        "lse_ptr": lse,
        "sinks_ptr": None if sinks is None else sinks.numpy(),
        "counter_ptr": counters,
        "q_heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "q_len": q.shape[2],
        "kv_len": k.shape[2],
        "batch": q.shape[0],
        "scale": DIM**-0.5,
    }
    if spec.blocks is Blocks.MAP:
        tiles = generated.plan.tiles
        call = problem(q, k, v, mask_mod=case.mask, block_mask=block_mask).call
        of_map, numbers, _ = map_operands(call, tiles.block_q, tiles.block_kv, by_keys=False)
        of_call: dict[Any, Any] = numbers | {source: x.numpy() for source, x in of_map.items()}
        known |= {a.name: of_call[a.source] for a in generated.arguments if a.source in of_call}
    together = generated.plan.packed_heads
    packed = (hopper_plan.ROWS // together, DIM, together, q.shape[1] // k.shape[1])
    for name, array in tensors.items():
        known[f"{name}_ptr"] = array
        known[f"{name}_desc"] = Descriptor(array, keys, DIM) if name in "kv" else Descriptor(array, *packed)
        known |= {f"{name}_stride_{axis}": array.strides[n] // 4 for n, axis in enumerate("bhs")}
    arguments = {
        a.name: known[a.name] if a.name in known else _captured(a, values) for a in generated.arguments
    }
    programs = case.parts * q.shape[0] * q.shape[1] or 2
    run(generated.source, generated.entry, arguments, programs)
    assert not counters.any()  # the next launch starts from them
    return torch.from_numpy(tensors["out"]).bfloat16(), torch.from_numpy(lse)


def _captured(argument: Argument, values: tuple[Any, ...]) -> Any:
    """The value of an argument that a capture gives."""
    value = values[argument.slot]
    if argument.source is Source.CAPTURE_SIZE:
        return value.shape[argument.dimension]
    if argument.source is Source.CAPTURE_STRIDE:
        return value.stride(argument.dimension)
    return value.numpy() if isinstance(value, torch.Tensor) else value
