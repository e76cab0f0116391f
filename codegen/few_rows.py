"""Tiles for few query rows, as in decoding: rows of all heads that share keys and values fill one tile.

With one query row, a tile of 64 or 128 rows is empty but for one. Where `group` query heads read the same
keys and values, their rows make one tile, which reads these once instead of `group` times.

Tiles of the portable kernels may be small. Those of the Hopper kernel have 64 rows or more: its rows are few
where tiles of one head would be emptier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from flexc.codegen.hoisting import score_form
from flexc.ir.expr import inputs_of
from flexc.ir.ops import Input
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec

FEW = 64
"""Fewer query rows than this are few: a usual tile is at least half empty."""
_SMALL, _LARGE = 16, 64
_LARGE_WIDE = 32
"""For head dimensions above 128, whose tiles of 64 rows have too few registers on most GPUs."""
_GROUP, _USUAL = 64, 128
"""Rows of the Hopper kernel's tiles: of one warpgroup, and of two, as most tiles have."""
_FULLER = 0.8
"""Rows of packed tiles, of those of usual ones, at most: packed ones cost a little more each."""
_BUSY = 66
"""Half the multiprocessors of an H200."""
LONGEST_FEW = 4 * _USUAL
"""Of longer queries, usual tiles are always fuller than that."""


def for_few_rows(
    spec: AttentionSpec, q_len: int, group: int, map_heads: int, options: Mapping[str, object]
) -> AttentionSpec:
    """`spec` with tiles for `q_len` query rows; itself where these are many, or the tile was asked for.

    Args:
        spec: of a call.
        q_len: query rows of a head.
        group: query heads that share keys and values.
        map_heads: heads of the user's block map; 1 where there is none.
        options: of the call.
    """
    if not 0 < q_len < FEW or "block_q" in options:
        return spec
    most = _LARGE if max(spec.head_dim, spec.head_dim_v) <= 128 else _LARGE_WIDE
    heads = 1 << (group - 1).bit_length()
    if heads > most or _differ(spec, map_heads):
        heads = 1
    wanted = heads * (1 << (q_len - 1).bit_length())
    rows = min((_SMALL if wanted <= _SMALL else most) // heads, spec.max_block_q)
    return replace(spec, few_rows=rows, packed_heads=heads)


def for_few_rows_on_hopper(
    spec: AttentionSpec,
    q_len: int,
    group: int,
    map_heads: int,
    options: Mapping[str, object],
    apart: int | None = None,
) -> AttentionSpec:
    """`spec` with tiles of the Hopper kernel that have rows of all heads of a group, where these are fuller.

    Itself where they are not, or can't be; see `for_few_rows`. `apart` is how many heads of keys all batches
    have together, None for many.
    """
    heads = 1 << (group - 1).bit_length()
    if q_len < 1 or not 1 < heads <= _GROUP or "block_q" in options or spec.dropout:
        return spec
    if _differ(spec, map_heads) or _has_keys_of_heads(spec):
        return spec
    # Where fewer programs than that would run, twice as many with half the rows are done sooner.
    few = apart is not None and apart * -(-heads * q_len // _USUAL) < _BUSY
    tile = _GROUP if few or heads * q_len <= _GROUP else _USUAL
    rows = tile // heads
    usual = group * min(n * -(-q_len // n) for n in _usual(spec))
    if tile * -(-q_len // rows) > _FULLER * usual or spec.max_block_q % rows:
        return spec
    return replace(spec, few_rows=rows, packed_heads=heads)


def hopper_takes_few(packed: AttentionSpec, q_len: int) -> bool:
    """Whether `auto` takes the Hopper kernel for fewer than `FEW` rows; `packed` has its tiles for them.

    Timed on an H200 with 8,192 keys and 64 or 128 head dimensions, where the portable kernel has tiles of 64
    rows as well: 0.8 to 0.9 of its time. Where that one has tiles of 16 rows, or wider heads, it stays.
    """
    wide = max(packed.head_dim, packed.head_dim_v) > 128
    return packed.few_rows > 0 and packed.packed_heads * q_len > _SMALL and not wide


def _usual(spec: AttentionSpec) -> tuple[int, ...]:
    """Rows of usual tiles: of narrow heads there are some of three warpgroups."""
    return (_USUAL,) if max(spec.head_dim, spec.head_dim_v) > 64 else (_USUAL, _GROUP * 3)


@lru_cache(maxsize=256)
def _has_keys_of_heads(spec: AttentionSpec) -> bool:
    """Whether a part of the score is of a key and a head: what a key has is loaded once for all rows."""
    score, _ = score_form(spec)
    if score is None:
        return False
    parts = (node for node, level in place(score).items() if level is Placement.COLUMN)
    return any(Input.H in inputs_of(node) for node in parts)


def _differ(spec: AttentionSpec, map_heads: int) -> bool:
    """Whether the heads of a group may see different keys."""
    return map_heads > 1 or (spec.mask is not None and Input.H in inputs_of(spec.mask))
