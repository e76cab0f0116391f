"""Tiles that intervals leave open: looked at in some places, then cut into boxes, then pair by pair.

A few pairs of a tile are evaluated. Where they differ, the tile is PARTIAL. Where they agree, only a pair
that contradicts them makes a difference, and the search for one goes from boxes that intervals can't settle
to smaller ones, and to the pairs of the smallest. Without one the tile is FULL or EMPTY, as its samples are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexc.ir.arrays import Array
from flexc.ir.boxes import BoxedMask, Boxes, Tiles, parts, taken
from flexc.ir.interval_types import Bounds
from flexc.ir.ledger import Ledger

_CUTS = 4  # a box is cut into 4 x 4
_SMALLEST = 1024  # pairs of a box that is evaluated rather than cut
_LARGEST = 2**16  # pairs of a box that may be evaluated
_HOPELESS = 1.25  # where cutting settles less than a fifth of the pieces, larger boxes are cheaper


class OpenTiles(NamedTuple):
    """The tiles of a list that are not empty, and how many of all each step decided."""

    full: Tiles
    partial: Tiles
    interval: int
    sample: int
    exact: int


def decide(mask: BoxedMask, tiles: Tiles, ledger: Ledger) -> OpenTiles:
    """What single tiles are; `ledger` counts the pairs that are evaluated."""
    arrays = mask.arrays
    differ, value = _sampled(mask, tiles, ledger)
    sampled = taken(tiles, arrays.positions(differ))
    rest = arrays.positions(~differ)
    tiles, value = taken(tiles, rest), value[rest]
    search = _Search(mask, value, ledger)
    for part in parts(_whole(mask, tiles), max(1, mask.boxes_at_once // _CUTS**2)):
        search.run(part)
    found = search.contradicted
    exact = len(arrays.positions(search.evaluated))
    partial = taken(tiles, arrays.positions(found))
    return OpenTiles(
        full=taken(tiles, arrays.positions(value & ~found)),
        partial=Tiles(*(arrays.concat([a, b]) for a, b in zip(sampled, partial, strict=True))),
        interval=len(tiles.q) - exact,
        sample=len(sampled.q),
        exact=exact,
    )


def _sampled(mask: BoxedMask, tiles: Tiles, ledger: Ledger) -> tuple[Array, Array]:
    """Whether samples of each tile differ, and the value of those that don't: corners first, then more."""
    arrays, grid = mask.arrays, mask.grid
    differ = arrays.zeros(tiles.q.shape, (tiles.q != tiles.q).dtype)
    value = differ
    places = zip(_samples(grid.block_q), _samples(grid.block_kv), strict=True)
    left = arrays.arange(len(tiles.q))
    for rows, columns in places:
        some, every = [], []
        for part in parts(taken(tiles, left), mask.pairs_at_once // (len(rows) * len(columns))):
            seen = _at(mask, part, rows, columns)
            ledger.pairs += seen.shape[0] * seen.shape[1]
            some.append(seen.any(1))
            every.append(seen.all(1))
        if not some:
            break
        seen_some, seen_every = arrays.concat(some), arrays.concat(every)
        differ, value = _put(differ, left, seen_some & ~seen_every), _put(value, left, seen_every)
        left = left[arrays.positions(seen_some == seen_every)]
    return differ, value


def _put(x: Array, index: Array, values: Array) -> Array:
    x = x | x  # a copy
    x[index] = values
    return x


def _at(mask: BoxedMask, tiles: Tiles, rows: Sequence[int], columns: Sequence[int]) -> Array:
    """The mask at the given rows and columns of each tile; past a length, at its last one."""
    grid, arrays = mask.grid, mask.arrays
    q = tiles.q[:, None] * grid.block_q + arrays.asarray(rows)[None, :]
    kv = tiles.kv[:, None] * grid.block_kv + arrays.asarray(columns)[None, :]
    return mask.values_at(tiles.plane, q.clip(None, grid.q_len - 1), kv.clip(None, grid.kv_len - 1))


def _samples(block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places within a block to look at: the ends, then neighbours and odd fractions."""
    inner = {0, 1, block // 3, block // 2 + 1, 3 * block // 4, block - 2, block - 1}
    return (0, block - 1), tuple(sorted(place for place in inner if 0 <= place < block))


def _whole(mask: BoxedMask, tiles: Tiles) -> Boxes:
    """Each tile as one box, within the lengths."""
    grid = mask.grid
    q, kv = tiles.q * grid.block_q, tiles.kv * grid.block_kv
    q_last = (q + (grid.block_q - 1)).clip(None, grid.q_len - 1)
    kv_last = (kv + (grid.block_kv - 1)).clip(None, grid.kv_len - 1)
    return Boxes(mask.arrays.arange(len(q)), tiles.plane, q, q_last, kv, kv_last)


class _Search:
    """For pairs whose value is not `value[owner]`."""

    def __init__(self, mask: BoxedMask, value: Array, ledger: Ledger) -> None:
        self._mask = mask
        self._value = value
        self._ledger = ledger
        self.contradicted = value & ~value
        self.evaluated = value & ~value

    def run(self, boxes: Boxes) -> None:
        """Settles the owners of the boxes, which all have one nominal size. Depth first, to hold few."""
        grid = self._mask.grid
        pending = [(boxes, grid.block_q, grid.block_kv)]
        while pending:
            boxes, height, width = pending.pop()
            boxes = self._still_open(boxes)
            if height * width > _SMALLEST:
                pieces = _cut(boxes, -(-height // _CUTS), -(-width // _CUTS), self._mask)
                opened = self._unsettled(pieces)
                if height * width <= _LARGEST and _HOPELESS * len(opened.owner) > len(pieces.owner):
                    self._evaluate(self._still_open(boxes), height, width)
                    continue
                boxes, height, width = opened, -(-height // _CUTS), -(-width // _CUTS)
                if height * width > _SMALLEST:
                    size = max(1, self._mask.boxes_at_once // _CUTS**2)
                    pending.extend((part, height, width) for part in parts(boxes, size))
                    continue
            self._evaluate(boxes, height, width)

    def _still_open(self, boxes: Boxes) -> Boxes:
        return taken(boxes, self._mask.arrays.positions(~self.contradicted[boxes.owner]))

    def _unsettled(self, boxes: Boxes) -> Boxes:
        """The boxes that may hold a contradiction and whose owners have none yet."""
        surely, possibly = self._mask.bounds(
            boxes.plane, Bounds(boxes.q_first, boxes.q_last), Bounds(boxes.kv_first, boxes.kv_last)
        )
        value = self._value[boxes.owner]
        opposite = (value & ~possibly) | (~value & surely)
        self.contradicted[boxes.owner[self._mask.arrays.positions(opposite)]] = True
        agrees = (value & surely) | (~value & ~possibly)
        return self._still_open(taken(boxes, self._mask.arrays.positions(~agrees)))

    def _evaluate(self, boxes: Boxes, height: int, width: int) -> None:
        """Looks at all pairs: at one box of each owner first, which often holds a contradiction."""
        arrays = self._mask.arrays
        if not len(boxes.owner):
            return
        leads = boxes.owner == boxes.owner  # all, and then not where the box before has the same owner
        leads[1:] = boxes.owner[1:] != boxes.owner[:-1]
        self._look(taken(boxes, arrays.positions(leads)), height, width)
        self._look(self._still_open(taken(boxes, arrays.positions(~leads))), height, width)

    def _look(self, boxes: Boxes, height: int, width: int) -> None:
        mask, arrays = self._mask, self._mask.arrays
        rows, columns = arrays.arange(height)[None, :], arrays.arange(width)[None, :]
        for part in parts(boxes, mask.pairs_at_once // (height * width)):
            q = arrays.xp.minimum(part.q_first[:, None] + rows, part.q_last[:, None])
            kv = arrays.xp.minimum(part.kv_first[:, None] + columns, part.kv_last[:, None])
            seen = mask.values_at(part.plane, q, kv)
            self._ledger.pairs += seen.shape[0] * seen.shape[1]
            opposite = (seen != self._value[part.owner][:, None]).any(1)
            self.evaluated[part.owner] = True
            self.contradicted[part.owner[arrays.positions(opposite)]] = True


def _cut(boxes: Boxes, height: int, width: int, mask: BoxedMask) -> Boxes:
    """The boxes in pieces of at most `height` x `width`, of each box side by side."""
    arrays, inner = mask.arrays, mask.arrays.arange(_CUTS * _CUTS)
    q = boxes.q_first[:, None] + (inner // _CUTS * height)[None, :]
    kv = boxes.kv_first[:, None] + (inner % _CUTS * width)[None, :]
    inside = arrays.positions((q <= boxes.q_last[:, None]) & (kv <= boxes.kv_last[:, None]))
    box = inside // (_CUTS * _CUTS)
    q, kv = q.reshape(-1)[inside], kv.reshape(-1)[inside]
    least = arrays.xp.minimum
    return Boxes(
        owner=boxes.owner[box],
        plane=boxes.plane[box],
        q_first=q,
        q_last=least(q + (height - 1), boxes.q_last[box]),
        kv_first=kv,
        kv_last=least(kv + (width - 1), boxes.kv_last[box]),
    )
