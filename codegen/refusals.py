"""Why tiles were not taken, in the words that every plan uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from flexc.codegen.target import Target
from flexc.errors import NoFeasiblePlan
from flexc.ir.spec import AttentionSpec

if TYPE_CHECKING:
    from flexc.codegen.tiles import Tiles


class Spilled(str):
    """Why compiled tiles proved bad, where it is that they need too many registers: lighter ones may do."""

    __slots__ = ()


SMALLER = "leave out the options, or ask for smaller tiles and fewer stages"
"""The hint where the sizes that a user asked for do not fit."""


def first_fitting(
    candidates: Iterable[Tiles], problem: Callable[[Tiles], str | None], *, title: str, hint: str
) -> Tiles:
    """The first candidate without a `problem`.

    Raises:
        NoFeasiblePlan: there is none; see `no_tiles`.
    """
    tried: dict[Tiles, str] = {}
    for tiles in candidates:
        found = problem(tiles)
        if found is None:
            return tiles
        tried[tiles] = found
    raise no_tiles(title, tried, hint)


def no_tiles(title: str, tried: Mapping[Tiles, str], hint: str) -> NoFeasiblePlan:
    """The error of a plan that no candidate serves: the title, then each candidate and its problem."""
    listed = [
        f"{t.block_q}x{t.block_kv}, {t.num_warps} warps, {t.num_stages} stages: {why}"
        for t, why in tried.items()
    ]
    return NoFeasiblePlan("\n  ".join([f"{title}:", *listed]), hint=hint)


def with_history(reason: str, skip: Mapping[Tiles, str]) -> str:
    """The reason for tiles, and what proved bad about those that were compiled before them."""
    if not skip:
        return reason
    tried = [f"{t.block_q}x{t.block_kv} with {t.num_warps} warps had {why}" for t, why in skip.items()]
    return f"{reason} ({'; '.join(tried)})"


def off_the_map(spec: AttentionSpec, rows: int, columns: int) -> str | None:
    """Why tiles of so many queries and keys cut the blocks of the user's map; None if they do not."""
    if spec.max_block_q % rows == 0 and spec.max_block_kv % columns == 0:
        return None
    return f"the map's blocks are multiples of {spec.max_block_q}x{spec.max_block_kv} only"


def too_large(needed: int, target: Target, about: str = "") -> str | None:
    """Why `needed` bytes of shared memory, known or `about`, are too many; None if the target has them."""
    if needed <= target.shared_memory:
        return None
    return f"{about}{needed} bytes of shared memory, {target.shared_memory} there"
