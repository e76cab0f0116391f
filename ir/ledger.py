"""What building a block map has cost so far, and whether the rest is within the budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from flexc.errors import MaskTooOpen

DEFAULT_BUDGET = 2**36
"""Pairs: all of a mask of 262,144 x 262,144, some minutes of one CPU core."""

_FORESIGHT = 64  # after this part of the budget, what the rest will cost can be told
_MARGIN = 2.0  # tiles still to come may be cheaper than those seen
_BYTES_A_RUN = 64  # with what sorting takes


@dataclass(slots=True)
class Ledger:
    """Counts of one map: pairs that were evaluated, single tiles looked at that intervals left open, runs."""

    budget: float
    pairs: int = 0
    tiles: int = 0
    runs: int = 0
    began: float = field(default_factory=perf_counter)

    def check(self, waiting: int, pairs_a_tile: int) -> None:
        """Stops a map that takes more pairs than its budget, as soon as that can be told.

        `waiting` is how many single tiles may still have to be looked at.

        Raises:
            MaskTooOpen: says what the whole map would cost.
        """
        share = (self.tiles + waiting) / max(self.tiles, 1)
        expected = self.pairs * share
        foreseen = self.pairs > self.budget / _FORESIGHT and expected > _MARGIN * self.budget
        if self.pairs <= self.budget and not foreseen:
            return
        seconds = (perf_counter() - self.began) * share
        raise too_open(
            pairs=expected,
            tiles=self.tiles + waiting,
            pairs_a_tile=pairs_a_tile,
            budget=self.budget,
            cost=f"about {seconds:,.0f} s and {self.runs * share * _BYTES_A_RUN / 2**20:,.0f} MB",
        )


def too_open(*, pairs: float, tiles: int, pairs_a_tile: int, budget: float, cost: str) -> MaskTooOpen:
    """The error for a map that takes `pairs` evaluations for `tiles` open tiles; `cost` in other units."""
    wanted = 2 ** max(0, int(pairs)).bit_length()
    return MaskTooOpen(
        f"the block map of this mask would take about {pairs:.2g} evaluations of the mask at single pairs, "
        f"{cost}: no analysis decides about {tiles:,} of its tiles, which have {pairs_a_tile:,} pairs each; "
        f"the budget is {budget:.2g} pairs",
        hint=f"allow it: block_mask=flexc.create_block_mask(..., budget={wanted}), or math.inf for no limit; "
        "larger blocks have fewer tiles, and positions ordered so that what attends lies together open fewer",
    )
