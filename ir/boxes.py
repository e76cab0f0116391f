"""A mask over boxes of pairs: bounded by intervals, or evaluated pair by pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from flexc.ir.arrays import Array, Arrays, convert
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.interval import IntervalEnv, bounds, live_nodes
from flexc.ir.interval_types import Bounds
from flexc.ir.ops import Input
from flexc.ir.range_tables import RangeTables
from flexc.ir.runs import TileGrid

_LARGEST_CHUNK = 2**18
_PAIRS_IN_CACHE = 2**18
_BYTES_A_PAIR = 32  # a few live 4-byte and 1-byte arrays
_LEAST_CHUNK = 256

Columns = TypeVar("Columns", bound="Tiles | Boxes")


class Tiles(NamedTuple):
    """Tiles of some scale: the batch and head (`b * heads + h`), and the place in units of the scale."""

    plane: Array
    q: Array
    kv: Array


class Boxes(NamedTuple):
    """Boxes of pairs with inclusive ends, and the number of the tile that each is a part of."""

    owner: Array
    plane: Array
    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array


def taken(columns: Columns, index: Array) -> Columns:
    """The rows at `index`."""
    return type(columns)(*(column[index] for column in columns))


def parts(columns: Columns, size: int) -> Iterator[Columns]:
    """The rows in lists of at most `size` (at least one)."""
    size = max(1, size)
    for start in range(0, len(columns[0]), size):
        yield type(columns)(*(column[start : start + size] for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class BoxedMask:
    """A bound bool expression with its captures; `workspace` is bytes of temporary memory."""

    mask: Expr
    values: Sequence[Array]
    grid: TileGrid
    arrays: Arrays
    workspace: int
    load_bounds: RangeTables

    @property
    def boxes_at_once(self) -> int:
        """How many boxes to bound at once."""
        return max(_LEAST_CHUNK, min(self.workspace // (16 * live_nodes(self.mask)), _LARGEST_CHUNK))

    @property
    def pairs_at_once(self) -> int:
        """How many pairs to evaluate at once."""
        return min(self.workspace // _BYTES_A_PAIR, _PAIRS_IN_CACHE)

    def bounds(self, plane: Array, q: Bounds, kv: Bounds) -> Bounds:
        """Whether the mask is surely, and possibly, true in boxes: of the broadcast shape or smaller."""
        b, h = self._batch_and_head(plane)
        inputs = {Input.B: Bounds(b, b), Input.H: Bounds(h, h), Input.Q_IDX: q, Input.KV_IDX: kv}
        return bounds(self.mask, IntervalEnv(inputs, self.values, self.load_bounds, self.arrays.xp))

    def values_at(self, plane: Array, q: Array, kv: Array) -> Array:
        """The mask at rows [n, r] and columns [n, c] of planes [n]: bool [n, r * c] (1: it reads neither)."""
        xp = self.arrays.xp
        b, h = self._batch_and_head(plane)
        inputs = {
            Input.B: convert(xp, b, xp.int32)[:, None, None],
            Input.H: convert(xp, h, xp.int32)[:, None, None],
            Input.Q_IDX: convert(xp, q, xp.int32)[:, :, None],
            Input.KV_IDX: convert(xp, kv, xp.int32)[:, None, :],
        }
        value = evaluate(self.mask, Env(inputs, self.values, xp, xp.float32))
        count = len(plane)
        if value.ndim == 0:
            return xp.broadcast_to(value, (count, 1))
        return xp.broadcast_to(value, (count, *value.shape[1:])).reshape(count, -1)

    def _batch_and_head(self, plane: Array) -> tuple[Array, Array]:
        return plane // self.grid.heads, plane % self.grid.heads
