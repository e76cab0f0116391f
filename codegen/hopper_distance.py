"""What a Hopper kernel computes once a distance of a tile, and how its threads share it.

See `codegen.distance` for what that is, and `_hopper_distance.jinja` for the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexc.codegen.hoisting import Function, Vector
from flexc.codegen.hopper_words import gluon


@dataclass(frozen=True, slots=True)
class ByDistance:
    """The vectors of a kernel, and the tile of a warpgroup that they are spread over: its sizes by name.

    `is_by_keys`: its rows are keys. A thread's numbers of a tile, joined two by two, have the shape
    `spread_shape`; `spread_order` says how its dimensions are those of the tile. `waits`: threads exchange
    values when the scores are there, not before, since few registers are free.
    """

    vectors: tuple[Vector, ...]
    is_by_keys: bool
    rows: str
    columns: str
    spread_shape: tuple[int, ...]
    spread_order: tuple[int, ...]
    waits: bool

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls that compute them for a window of distances."""
        return tuple(vector.call for vector in self.vectors)

    @property
    def halves(self) -> tuple[int, ...]:
        """The shape of a thread's numbers, bit by bit."""
        return (128, *self.spread_shape[3:])


def by_distance(
    vectors: Sequence[Vector], columns: int, *, is_by_keys: bool, waits: bool = False
) -> ByDistance:
    """Those of a tile of 64 rows and `columns`, in Gluon's words.

    A tile is warps, threads down and across, the columns' blocks of 8 bit by bit, and in these two columns of
    two rows.
    """
    bits = (columns // 8).bit_length() - 1
    blocks = tuple(range(2 + bits, 2, -1))
    return ByDistance(
        vectors=tuple(replace(v, function=function_of(v.function), call=gluon([v.call])[0]) for v in vectors),
        is_by_keys=is_by_keys,
        rows="KEYS" if is_by_keys else "ROWS",
        columns="BLOCK_Q" if is_by_keys else "BLOCK_KV",
        spread_shape=(4, 8, 4, *(2,) * (bits + 2)),
        spread_order=(0, bits + 4, 1, *blocks, 2, bits + 3),
        waits=waits,
    )


def function_of(function: Function) -> Function:
    """A function that was emitted for Triton, in Gluon's words."""
    return replace(function, statements=gluon(function.statements), result=gluon([function.result])[0])
