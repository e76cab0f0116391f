"""Least and greatest values of captured tensors over boxes of indices, for interval analysis.

A dimension whose index is one known number is looked up. Up to two dimensions may be ranges: these are cut
into blocks, and a sparse table of the blocks' extremes (1, 2, 4, ... blocks from each start) answers any
range by two look-ups a dimension. Ranges are rounded outward to blocks. With more ranges, the whole
dimension answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from flexc.ir.arrays import Array, Namespace, convert
from flexc.ir.interval_types import Bounds

_BLOCKS_OF_ONE_RANGE = 16384
_BLOCKS_OF_TWO_RANGES = 128
_LARGEST_TABLE = 2**22
_MOST_RANGES = 2


@dataclass(frozen=True, slots=True, eq=False)
class RangeTables:
    """The `load_bounds` of interval analysis for the captures `values`; tables are built when needed."""

    values: Sequence[Array]
    xp: Namespace
    _built: dict[tuple[int, tuple[int, ...]], _Tables] = field(default_factory=dict)

    def __call__(self, slot: int, indices: tuple[Bounds, ...]) -> Bounds:
        """Bounds of the captured tensor in `slot` over the box `indices`, as `evaluate` would read it."""
        xp = self.xp
        source = np.asarray(self.values[slot]) if xp is np else self.values[slot]
        if not indices:
            return Bounds(source, source)
        if 0 in source.shape:
            zero = xp.zeros_like(indices[0].lo)
            return Bounds(zero, zero)
        boxes = [_inside(xp, index, n) for index, n in zip(indices, source.shape, strict=True)]
        ranges = tuple(d for d, box in enumerate(boxes) if not _is_point(box))
        if not ranges:
            value = _plain(xp, source)[tuple(box.lo for box in boxes)]
            return Bounds(value, value)
        tables = self._built.get((slot, ranges))
        if tables is None:
            tables = self._built[slot, ranges] = _build(xp, _plain(xp, source), ranges)
        return tables.bounds(
            [boxes[d] for d in range(len(boxes)) if d not in ranges], [boxes[d] for d in ranges]
        )


def _plain(xp: Namespace, source: Array) -> Array:
    """Booleans as bytes, and 8-bit floats as 32-bit ones: torch has no extremes and no gather of these."""
    if source.dtype in (np.bool_, getattr(xp, "bool", np.bool_)):
        return source.view(xp.uint8)
    if xp is not np and source.dtype.itemsize == 1 and source.dtype.is_floating_point:
        return source.to(xp.float32)
    return source.detach() if xp is not np else source


def _is_point(box: Bounds) -> bool:
    return box.lo is box.hi or bool((box.lo == box.hi).all())


def _inside(xp: Namespace, index: Bounds, length: int) -> Bounds:
    """The positions that the indices reach: negative ones count from the end, others outside are clamped."""
    lo = xp.where(index.lo < 0, index.lo + length, index.lo)
    hi = xp.where(index.hi < 0, index.hi + length, index.hi)
    if index.lo is index.hi:
        lo = hi = lo.clip(0, length - 1)
        return Bounds(lo, hi)
    both = (index.lo < 0) & (index.hi >= 0)
    lo = xp.where(both, xp.zeros_like(lo), lo.clip(0, length - 1))
    hi = xp.where(both, xp.zeros_like(hi) + (length - 1), hi.clip(0, length - 1))
    return Bounds(lo, hi)


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Extremes as arrays `[points..., level, block(, level, block)]`; `steps` are the block lengths."""

    xp: Namespace
    least: Array
    greatest: Array
    steps: tuple[int, ...]
    logs: Array

    def bounds(self, points: list[Bounds], ranges: list[Bounds]) -> Bounds:
        """Bounds at the points and over the ranges; all of a dimension that `steps` has no entry for."""
        choices = []
        for box, step in zip(ranges, self.steps, strict=False):
            first, last = box.lo // step, box.hi // step
            level = self.logs[last - first + 1]
            second = last - (1 << level) + 1
            choices.append([(level, first), (level, second)])
        start = tuple(point.lo for point in points)
        keys = [start + tuple(i for pair in chosen for i in pair) for chosen in product(*choices)]
        return Bounds(
            reduce(self.xp.minimum, (self.least[key] for key in keys)),
            reduce(self.xp.maximum, (self.greatest[key] for key in keys)),
        )


def _build(xp: Namespace, source: Array, ranges: tuple[int, ...]) -> _Tables:
    extra = tuple(d for d in ranges[_MOST_RANGES:])
    kept = ranges[:_MOST_RANGES]
    ends = []
    lengths = [source.shape[d] for d in kept]
    steps = _steps(lengths, source, ranges)
    for extreme, pair in ((xp.amin, xp.minimum), (xp.amax, xp.maximum)):
        table = extreme(source, axis=extra) if extra else source
        kept_now = [d - sum(e < d for e in extra) for d in kept]
        points = [d for d in range(table.ndim) if d not in kept_now]
        table = (
            xp.permute_dims(table, (*points, *kept_now)) if xp is np else table.permute(*points, *kept_now)
        )
        for position, step in enumerate(steps):
            axis = len(points) + 2 * position
            table = _levels(xp, _blocks(xp, table, axis, step, extreme), axis, pair)
        ends.append(table)
    return _Tables(xp, ends[0], ends[1], steps, _logarithms(xp, max(lengths) + 2, source))


def _steps(lengths: list[int], source: Array, ranges: tuple[int, ...]) -> tuple[int, ...]:
    """Block lengths, powers of two, for which the table is small."""
    most = _BLOCKS_OF_ONE_RANGE if len(lengths) == 1 else _BLOCKS_OF_TWO_RANGES
    others = 1
    for d, n in enumerate(source.shape):
        others *= 1 if d in ranges else n
    while True:
        steps = tuple(1 << max(0, (-(-n // most) - 1).bit_length()) for n in lengths)
        entries = others
        for n, step in zip(lengths, steps, strict=True):
            blocks = -(-n // step)
            entries *= blocks * blocks.bit_length()
        if entries <= _LARGEST_TABLE or most == 1:
            return steps
        most //= 2


def _blocks(xp: Namespace, x: Array, axis: int, step: int, extreme: Any) -> Array:
    """Extremes of each `step` elements along the axis; the last block may be shorter."""
    if step == 1:
        return x
    whole = x.shape[axis] // step
    before, after = tuple(x.shape[:axis]), tuple(x.shape[axis + 1 :])
    index = (slice(None),) * axis
    parts = []
    if whole:
        body = x[(*index, slice(0, whole * step))].reshape(*before, whole, step, *after)
        parts.append(extreme(body, axis=axis + 1))
    if whole * step < x.shape[axis]:
        rest = extreme(x[(*index, slice(whole * step, None))], axis=axis)
        parts.append(rest[(*index, None)])
    return parts[0] if len(parts) == 1 else xp.concatenate(tuple(parts), axis)


def _levels(xp: Namespace, x: Array, axis: int, pair: Any) -> Array:
    """`[..., level, start, ...]`: the extremes of `2**level` entries from each start, fewer at the end."""
    levels = [x]
    reach = 1
    index = (slice(None),) * axis
    while reach < x.shape[axis]:
        last = levels[-1]
        shorter = last[(*index, slice(0, x.shape[axis] - reach))]
        joined = pair(shorter, last[(*index, slice(reach, None))])
        levels.append(xp.concatenate((joined, last[(*index, slice(x.shape[axis] - reach, None))]), axis))
        reach *= 2
    return xp.stack(tuple(levels), axis)


def _logarithms(xp: Namespace, length: int, like: Array) -> Array:
    """The integer part of the binary logarithm of 0 to `length - 1` (0 of 0), on the device of `like`."""
    logs = np.zeros(length, np.int64)
    logs[1:] = np.log2(np.arange(1, length)).astype(np.int64)
    return logs if xp is np else convert(xp, xp.from_numpy(logs), xp.int64).to(like.device)
