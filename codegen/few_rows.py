"""Tiles for few query rows, as in decoding: rows of all heads that share keys and values fill one tile.

With one query row, a tile of 64 or 128 rows is empty but for one. Where `group` query heads read the same
keys and values, their rows make one tile, which reads these once instead of `group` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexc.ir.expr import inputs_of
from flexc.ir.ops import Input
from flexc.ir.spec import AttentionSpec

FEW = 64
"""Fewer query rows than this are few: a usual tile is at least half empty."""
_SMALL, _LARGE = 16, 64
_LARGE_WIDE = 32
"""For head dimensions above 128, whose tiles of 64 rows have too few registers on most GPUs."""


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


def _differ(spec: AttentionSpec, map_heads: int) -> bool:
    """Whether the heads of a group may see different keys."""
    return map_heads > 1 or (spec.mask is not None and Input.H in inputs_of(spec.mask))
