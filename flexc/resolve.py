"""From the mods and the block mask that a user passed to one pair of graphs with their captured values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flexc.call import PLAIN, Mods
from flexc.frontend.value import Value
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.graph import ModGraph
from flexc.ir.ops import Op
from flexc.lru import LRU

if TYPE_CHECKING:
    from flexc.ir.blockmap import BlockMap

_resolved: LRU[tuple[int, ...], tuple[tuple[ModGraph | None, ...], Mods]] = LRU(1024)


def resolve(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    block_mask: Any = None,
) -> tuple[Mods, tuple[Value, ...], BlockMap | None]:
    """The traced and simplified mods, the values of their captures now, and the block map that was passed.

    A block mask's own mask_mod applies as well, as in PyTorch.

    Raises:
        TraceError: a mod can't be traced.
    """
    if score_mod is None and mask_mod is None and block_mask is None:
        return PLAIN, (), None
    from flexc.mods import MaskMod, ScoreMod, trace_as

    block_map = None
    traces = [
        None if score_mod is None else trace_as(ScoreMod, score_mod),
        None if mask_mod is None else trace_as(MaskMod, mask_mod),
        None,
    ]
    if block_mask is not None:
        from flexc.block_mask import as_block_mask

        block_mask = as_block_mask(block_mask)
        block_map = block_mask.block_map
        if block_mask.mask_mod is not None and block_mask.mask_mod is not mask_mod:
            traces[2] = trace_as(MaskMod, block_mask.mask_mod)
    graphs = tuple(None if t is None else t.graph for t in traces)
    key = tuple(id(g) for g in graphs)
    found = _resolved.get(key)
    if found is None:
        found = (graphs, _combine(*graphs))  # holding the graphs keeps their ids theirs
        _resolved.put(key, found)
    values = tuple(value for t in traces if t is not None for value in t.values)
    return found[1], values, block_map


def _combine(score: ModGraph | None, *masks: ModGraph | None) -> Mods:
    from flexc.ir.substitute import renumber

    graphs = [g for g in (score, *masks) if g is not None]
    conditions: list[Expr] = []
    offset = 0 if score is None else len(score.captures)
    for graph in masks:
        if graph is not None:
            conditions.append(renumber(graph.root, offset))
            offset += len(graph.captures)
    score_root, mask_root = combine(None if score is None else score.root, conditions)
    return Mods(
        score=score_root,
        mask=mask_root,
        captures=tuple(c for g in graphs for c in g.captures),
        sources=tuple(g.source for g in graphs),
        graphs=tuple(graphs),
    )


def combine(score: Expr | None, masks: Sequence[Expr]) -> tuple[Expr | None, Expr | None]:
    """The score and the one mask of all `masks`, simplified; None for one that does nothing.

    `where(c, s, -inf)` inside the score becomes part of the mask. All have their captures in one list.
    """
    from flexc.ir.simplify import simplify
    from flexc.ir.split import split_score

    conditions = list(masks)
    if score is not None:
        score, condition = split_score(simplify(score))
        if condition is not None:
            conditions.insert(0, condition)
    mask = build.TRUE
    for condition in conditions:
        mask = build.logic(Op.AND, mask, condition)
    mask = simplify(mask)
    score = None if score is None else simplify(score)
    return (
        None if score is not None and score.op is Op.INPUT else score,
        None if mask is build.TRUE else mask,
    )
