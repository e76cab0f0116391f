"""How kernels look at the diagonals of a tile, whose pairs are equally far apart, and constants for that."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from flexc.codegen.preamble import Constant
from flexc.codegen.scatter import ScatterForm, Sum
from flexc.codegen.target import MatrixUnit, Target
from flexc.codegen.tiles import Tiles, power_of_two_at_least
from flexc.ir.types import Storage

_WIDEST = 32
"""Larger squares take more registers at a time, smaller ones more additions to memory."""
_SHORTEST_PRODUCT = 16
"""Squares of 8 in a tile: the least that a matrix product adds up."""


class Diagonals(Enum):
    """How a tile is added up along its diagonals; see `_scatter.jinja`."""

    PRODUCT = "product"
    """By a matrix product in tf32 with zeros and ones."""
    SQUARES = "squares"
    """Through shared memory, in squares of `SIDE`."""


def diagonals(
    scatters: Sequence[ScatterForm], storage: Storage, target: Target, tiles: Tiles
) -> Diagonals | None:
    """How the gradients among `scatters` that go by distance are added up; None if there are none.

    A product takes fewer instructions, and has the error of tf32: small beside that of bf16 inputs.
    """
    if not any(s.sum is Sum.DIAGONAL for s in scatters):
        return None
    is_long = tiles.block_q * tiles.block_kv >= 64 * _SHORTEST_PRODUCT
    by_product = storage is Storage.BF16 and is_long and target.matrix_unit is not MatrixUnit.TCGEN05
    return Diagonals.PRODUCT if by_product else Diagonals.SQUARES


def diagonal_constants(tiles: Tiles, *, reads: bool, adds: Diagonals | None) -> tuple[Constant, ...]:
    """What a kernel needs that `reads` by distance or `adds` up diagonals.

    See `_distance.jinja` and `_scatter.jinja`.
    """
    constants = []
    if reads or adds is Diagonals.PRODUCT:
        count = power_of_two_at_least(tiles.block_q + tiles.block_kv - 1)
        constants.append(Constant("DISTANCES", count, "of a tile, to a power of two"))
    if adds is Diagonals.SQUARES:
        side = min(_WIDEST, tiles.block_q, tiles.block_kv)
        constants.append(Constant("SIDE", side, "of the squares that diagonals are added up in"))
    return tuple(constants)
