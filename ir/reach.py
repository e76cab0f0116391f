"""How many keys a row sees, from the closed form of its mask, where that is a number in any long sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexc.ir.evaluate import Env, evaluate_all
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.ranges import LONGEST, Ranges

_LENGTH = LONGEST // 4


def reach(ranges: Ranges, values: Sequence[object]) -> int | None:
    """The keys in all ranges of a row in the middle of a very long sequence, of the first batch and head.

    `values` are the captures by slot. None where captured tensors decide.
    """
    bounds = tuple(bound for each in ranges.ranges for bound in (each.first, each.end))
    if not all(_is_known(node, values) for node in topological(*bounds)):
        return None
    inputs = {
        Input.B: np.int64(0),
        Input.H: np.int64(0),
        Input.Q_IDX: np.int64(_LENGTH // 2),
        Input.Q_LEN: np.int64(_LENGTH),
        Input.KV_LEN: np.int64(_LENGTH),
    }
    found = [int(bound) for bound in evaluate_all(bounds, Env(inputs, values, np, np.float32))]
    return sum(max(0, end - first) for first, end in zip(found[::2], found[1::2], strict=True))


def _is_known(node: Expr, values: Sequence[object]) -> bool:
    """Whether a node needs no tensor's elements: of tensors, the host knows the sizes only."""
    if node.op is Op.SCALAR:
        assert isinstance(node.attr, int)
        return isinstance(values[node.attr], int | float)
    return node.op is not Op.LOAD
