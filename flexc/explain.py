"""What was understood of a mask or a score function, as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from flexc.explain_ranges import has_formula, keys_of_a_row
from flexc.ir.blockmap import BlockMap, TileKind
from flexc.ir.build import TRUE
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.graph import Capture, ModSource
from flexc.ir.ops import Input
from flexc.ir.overview import overview
from flexc.ir.place import hoists
from flexc.ir.printer import to_formula
from flexc.ir.schedule import PARTIAL_COST, Schedule, schedule
from flexc.ir.split import conjuncts
from flexc.plane import plane
from flexc.resolve import resolve

Row = tuple[str, str]


def explain_mask(
    mask: Callable[..., Any],
    Q_LEN: int,
    KV_LEN: int,
    *,
    b: int = 0,
    h: int = 0,
    block_size: int = 128,
) -> str:
    """The formula that was traced, what it reads, the tile counts, and which analysis decided them.

    Args:
        mask: a MaskMod or a plain function `f(b, h, q_idx, kv_idx)`.
        Q_LEN: the number of queries.
        KV_LEN: the number of keys.
        b: the batch whose tiles are counted.
        h: the query head whose tiles are counted.
        block_size: the side of a tile.

    Raises:
        TraceError: the mask can't be traced.
    """
    view = plane(mask, Q_LEN, KV_LEN, b=b, h=h)
    names = tuple(capture.name for capture in view.captures)
    rows = [("formula", to_formula(view.graph, names))]
    rows += _captures(view.captures, resolve(None, mask)[1])
    rows.append(("reads", _reads(view.graph)))
    rows += _listed("keys", keys_of_a_row(view.graph, view.captures, view.values, Q_LEN, KV_LEN))
    parts = () if view.graph is TRUE else conjuncts(view.graph)
    if len(parts) > 1:
        rows += _listed("conditions", (to_formula(part, names) for part in parts))
    rows += _hoisted(names, view.graph)
    by_formula = has_formula(view.graph, view.values, Q_LEN, KV_LEN)
    rows += _tiles(view.block_map(block_size, block_size), _plane(view.graph, b, h), by_formula=by_formula)
    return _page(view.source, rows)


def explain_score(score: Callable[..., Any]) -> str:
    """The formula that was traced, its part that is a mask, and what a kernel computes outside its loop.

    Args:
        score: a ScoreMod or a plain function `f(score, b, h, q_idx, kv_idx)`.

    Raises:
        TraceError: the function can't be traced.
    """
    mods, values, _ = resolve(score, None)
    names = tuple(capture.name for capture in mods.captures)
    rows = [("formula", "score" if mods.score is None else to_formula(mods.score, names))]
    if mods.mask is not None:
        rows.append(("mask", to_formula(mods.mask, names)))
    rows += _captures(mods.captures, values)
    roots = [root for root in (mods.score, mods.mask) if root is not None]
    rows.append(("reads", _reads(*roots)))
    rows += _hoisted(names, *roots)
    return _page(mods.sources[0], rows)


def draw_tiles(block_map: BlockMap, *, columns: int = 96) -> str:
    """The tiles of the first batch and head as text, one character a tile, and what the characters mean.

    With more than `columns` tiles a side, a character stands for a square of them: partial unless all agree.
    """
    step = max(1, math.ceil(max(block_map.q_blocks, block_map.kv_blocks) / columns))
    cells = overview(block_map, -(-block_map.q_blocks // step), -(-block_map.kv_blocks // step))
    shades = np.where(cells.full == cells.tiles, int(TileKind.FULL), cells.partial + cells.full > 0)
    lines = ["".join(_TILE[TileKind(kind)] for kind in row).rstrip() for row in shades.tolist()]
    side = f"{block_map.block_q * step} x {block_map.block_kv * step}"
    meaning = ", ".join(f"{_TILE[kind]!r} {kind.name.lower()}" for kind in TileKind)
    return "\n".join([*lines, f"one character: {side} pairs; {meaning}"])


_TILE = {TileKind.EMPTY: "·", TileKind.PARTIAL: "▒", TileKind.FULL: "█"}


def _captures(captures: Sequence[Capture], values: Sequence[object]) -> list[Row]:
    texts = []
    for capture, value in zip(captures, values, strict=True):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            texts.append(f"{capture.name}: {dtype} tensor {tuple(value.shape)}")
        else:
            texts.append(f"{capture.name} = {value}")
    return _listed("captures", texts)


def _reads(*roots: Expr) -> str:
    read = {which for root in roots for which in inputs_of(root)}
    if not read:
        return "nothing: the same everywhere"
    text = ", ".join(which.value for which in Input if which in read)
    if read & {Input.B, Input.H}:
        return text
    return f"{text}; the same for every batch and head"


def _hoisted(names: Sequence[str], *roots: Expr) -> list[Row]:
    found = hoists(*roots)
    levels = (("once a head", found.head), ("once a row", found.row), ("once a column", found.column))
    return [
        row for label, parts in levels for row in _listed(label, (to_formula(part, names) for part in parts))
    ]


def _plane(mask: Expr, b: int, h: int) -> str:
    """Which batch and head are looked at, where that makes a difference."""
    read = inputs_of(mask)
    chosen = ((Input.B, f"batch {b}"), (Input.H, f"head {h}"))
    text = ", ".join(words for which, words in chosen if which in read)
    return f", {text} alone" if text else ""


def _tiles(block_map: BlockMap, which: str, *, by_formula: bool) -> list[Row]:
    counts = block_map.counts()
    total = sum(counts)
    size = f"{block_map.block_q} x {block_map.block_kv} over {block_map.q_len:,} x {block_map.kv_len:,}"
    rows = [("tiles", f"{total:,} of {size}{which}")]
    meanings = ("empty: skipped", "partial: mask evaluated", "full: mask skipped")
    for count, meaning in zip(counts, meanings, strict=True):
        rows.append(("", f"{count:>12,}  {count / max(total, 1):6.1%}  {meaning}"))
    decided = [
        f"{count:,} by {_ANALYSES.get(name, name)}" for name, count in block_map.decided.items() if count
    ]
    text = ", ".join(decided) or "no tile to decide"
    rows.append(("decided", f"by closed form; as a map: {text}" if by_formula else text))
    if block_map.rows and sum(counts[1:]):
        rows += _listed("work", _work(schedule(block_map)))
    return rows


_PROCESSORS = 132  # of an H100 or H200


def _work(plan: Schedule) -> list[str]:
    """The work in full tiles, how it is spread over the query blocks, and what an order makes of that."""
    busy = f"{plan.efficiency(_PROCESSORS):.0%}"
    return [
        f"{plan.total:,.0f} full tiles (a partial one counts {PARTIAL_COST}) of one head; the heaviest query "
        f"block has {plan.imbalance:.2f} x the mean",
        f"heaviest first, {_PROCESSORS} processors would be busy {busy} of the time",
    ]


_ANALYSES = {"interval": "interval analysis", "sample": "a sample of pairs", "exact": "every pair"}


def _listed(label: str, texts: Iterable[str]) -> list[Row]:
    return [(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _page(source: ModSource, rows: Sequence[Row]) -> str:
    where = f"{source.file}:{source.line}" if source.file else "no source"
    lines = [f"{source.name}  ({where})"]
    lines += [f"  {label:<13} {text}".rstrip() for label, text in rows]
    return "\n".join(lines)
