"""Captured tensors that are too short for the positions at which a mod reads them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from flexc.call import Mods
from flexc.errors import ShapeMismatch
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.split import conjuncts

_POSITIONS = (Input.Q_IDX, Input.KV_IDX)


class _Read(NamedTuple):
    """An entry of a captured tensor that every pair reads for which the `conditions` hold."""

    slot: int
    dimension: int
    position: Input
    conditions: tuple[Expr, ...]


def check_positions(mods: Mods, values: tuple[object, ...], q_len: int, kv_len: int) -> None:
    """A tensor that is read at `q_idx` or `kv_idx` itself has an entry for each that a visible pair has.

    Checked is what costs nothing: conditions beside the read that are captured tensors' contents may hide it.

    Raises:
        ShapeMismatch: there is a visible pair without an entry.
    """
    for read in _reads(mods.score, mods.mask):
        value, length = values[read.slot], q_len if read.position is Input.Q_IDX else kv_len
        if not isinstance(value, torch.Tensor) or value.shape[read.dimension] >= length:
            continue
        entries = value.shape[read.dimension]
        if any(_is_seen(read, at, values, q_len, kv_len) for at in (entries, length - 1)):
            name, axis = mods.captures[read.slot].name, "queries" if read.position is Input.Q_IDX else "keys"
            raise ShapeMismatch(
                f"the captured tensor {name!r} has shape {tuple(value.shape)} and is read at "
                f"{read.position.value} in dimension {read.dimension}, but there are {length} {axis}",
                hint=f"give it {length} entries, or hide the {axis} that have none by another condition",
            )


def _is_seen(read: _Read, at: int, values: tuple[object, ...], q_len: int, kv_len: int) -> bool:
    """Whether the conditions hold somewhere in the row or column `at`."""
    rows, columns = np.arange(q_len, dtype=np.int64), np.arange(kv_len, dtype=np.int64)
    here = np.asarray([at], np.int64)
    inputs = {
        Input.B: np.int64(0),
        Input.H: np.int64(0),
        Input.Q_IDX: here if read.position is Input.Q_IDX else rows,
        Input.KV_IDX: here if read.position is Input.KV_IDX else columns,
        Input.Q_LEN: np.int64(q_len),
        Input.KV_LEN: np.int64(kv_len),
    }
    seen = np.ones(kv_len if read.position is Input.Q_IDX else q_len, bool)
    for condition in read.conditions:
        seen = seen & evaluate(condition, Env(inputs, values, np, np.float32))
    return bool(seen.any())


@lru_cache(maxsize=256)
def _reads(score: Expr | None, mask: Expr | None) -> tuple[_Read, ...]:
    parts = () if mask is None else conjuncts(mask)
    found = [] if score is None else _unconditional(score, parts)
    for part in parts:
        found += _unconditional(part, tuple(p for p in parts if p is not part))
    return tuple(dict.fromkeys(found))


def _unconditional(root: Expr, conditions: tuple[Expr, ...]) -> list[_Read]:
    if any(node.op is Op.LOAD for node in topological(*conditions)):
        return []
    found, seen, waiting = [], set[Expr](), [root]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op is Op.LOAD and isinstance(node.attr, int):
            found += [
                _Read(node.attr, dimension, index.attr, conditions)
                for dimension, index in enumerate(node.args)
                if index.op is Op.INPUT and isinstance(index.attr, Input) and index.attr in _POSITIONS
            ]
        if node.op is Op.WHERE:
            waiting.append(node.args[0])
        elif node.op not in (Op.AND, Op.OR):
            waiting += node.args
    return found
