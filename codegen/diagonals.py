"""Constants of kernels that look at the diagonals of a tile, whose pairs are equally far apart."""

from __future__ import annotations

from flexc.codegen.preamble import Constant
from flexc.codegen.tiles import Tiles, power_of_two_at_least

_WIDEST = 32
"""Larger squares take more registers at a time, smaller ones more additions to memory."""


def diagonal_constants(tiles: Tiles, *, reads: bool, adds: bool) -> tuple[Constant, ...]:
    """What a kernel needs that `reads` by distance or `adds` up diagonals.

    See `_distance.jinja` and `_scatter.jinja`.
    """
    constants = []
    if reads:
        count = power_of_two_at_least(tiles.block_q + tiles.block_kv - 1)
        constants.append(Constant("DISTANCES", count, "of a tile, to a power of two"))
    if adds:
        side = min(_WIDEST, tiles.block_q, tiles.block_kv)
        constants.append(Constant("SIDE", side, "of the squares that diagonals are added up in"))
    return tuple(constants)
