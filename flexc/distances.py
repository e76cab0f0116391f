"""Whether a captured tensor that is read by distance has an element for every distance of a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_spec import BackwardSpec
from flexc.codegen.scatter import Sum
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op


def shares_distances(backward: BackwardSpec, values: Sequence[object], lengths: tuple[int, int]) -> bool:
    """Whether pairs of a row share an element of a captured tensor that is read by distance.

    Example: a table of 9 biases, of which the first and the last hold for all keys that are further away.
    """
    form = backward_form(backward, scatters=True)
    found = [s.indices for s in form.scatters if s.sum is Sum.DIAGONAL]
    numbers = tuple(value if isinstance(value, (int, float, bool)) else None for value in values)
    return not all(any(_is_one_a_distance(i, numbers, lengths) for i in indices) for indices in found)


@lru_cache(maxsize=64)
def _is_one_a_distance(index: Expr, numbers: tuple[Any, ...], lengths: tuple[int, int]) -> bool:
    """Whether no two distances have the same `index`; not known of what reads tensors or heads."""
    nodes = topological(index)
    inputs = {node.attr for node in nodes if node.op is Op.INPUT}
    if not inputs <= {Input.Q_IDX, Input.KV_IDX, Input.Q_LEN, Input.KV_LEN}:
        return False
    if any(
        node.op in (Op.LOAD, Op.SIZE) or (node.op is Op.SCALAR and _is_unknown(node, numbers))
        for node in nodes
    ):
        return False
    distances = np.arange(1 - lengths[1], lengths[0], dtype=np.int64)
    given = {
        Input.Q_IDX: np.maximum(distances, 0),
        Input.KV_IDX: np.maximum(-distances, 0),
        Input.Q_LEN: lengths[0],
        Input.KV_LEN: lengths[1],
    }
    at = np.asarray(evaluate(index, Env(given, numbers, np, np.float32)))
    return at.shape == distances.shape and np.unique(at).size == at.size


def _is_unknown(node: Expr, numbers: tuple[Any, ...]) -> bool:
    return not isinstance(node.attr, int) or numbers[node.attr] is None
