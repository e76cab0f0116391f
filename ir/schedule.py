"""What a block map says of the work: how much each block of queries has, and in which order to start them.

Attention's programs take a block of queries each and visit its tiles. Under a mask these differ in number, a
hundredfold in a causal one, and the last program to finish decides when all is done. Started heaviest first
(Graham's rule of the longest processing time, 1969), the lightest fill what room is left at the end: that is
at most a third longer than the best order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from flexc.ir.arrays import Array
from flexc.ir.blockmap import BlockMap
from flexc.ir.runs import TileKind

PARTIAL_COST = 1.25
"""A partial tile against a full one. Both take two matrix products and a softmax; a partial one evaluates the
mask as well, a few integer operations and a select a pair, next to the softmax's ten or so instructions."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The work of each row of a map, in full tiles, and the order of rows by it.

    A row is a block of queries of one batch and head, numbered as in `BlockMap`. `costs` float64 [rows].
    `order` int32 [rows]: the rows from heaviest to lightest; rows of equal cost keep their order, so that
    neighbours, which share keys, run at about the same time.
    """

    costs: Array
    order: Array

    @property
    def total(self) -> float:
        """The work of all rows, in full tiles."""
        return float(self.costs.sum())

    @property
    def imbalance(self) -> float:
        """The heaviest row's work over the mean; 1 where all are equal, or there is none."""
        return float(self.costs.max() / self.costs.mean()) if self.total > 0 else 1.0

    def makespan(self, processors: int) -> float:
        """When the last of `processors` ends, in full tiles, if a free one takes the next row in `order`.

        Never below `total / processors`, nor below the heaviest row.
        """
        free = [0.0] * max(1, min(processors, len(self.costs)))
        for cost in self.costs[self.order].tolist():
            heapq.heapreplace(free, free[0] + cost)
        return max(free)

    def efficiency(self, processors: int) -> float:
        """The share of the processors' time that is work: 1 where all end at once."""
        longest = self.makespan(processors)
        return self.total / (processors * longest) if longest > 0 else 1.0


def schedule(block_map: BlockMap) -> Schedule:
    """The schedule of a map's rows. Costs by the number of runs."""
    runs = np.asarray(block_map.runs, np.int64).reshape(-1, 3)
    row = np.asarray(block_map.row_of_runs())
    weight = np.where(runs[:, 2] == TileKind.FULL, 1.0, PARTIAL_COST)
    costs = np.bincount(row, (runs[:, 1] - runs[:, 0]) * weight, minlength=block_map.rows)
    order = np.argsort(-costs, kind="stable").astype(np.int32)
    return Schedule(costs.astype(np.float64), order)
