"""Pictures of masks. The cost is bounded: a long mask is drawn by its tiles, which the analyses decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flexc.errors import MissingPackage, UnknownOption
from flexc.ir.blockmap import TileKind
from flexc.ir.overview import Overview, overview
from flexc.plane import Plane, plane

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PAIRS = 1 << 22
"""Above this many pairs (2048 x 2048) a mask is drawn by tiles, not pair by pair."""

MAX_CELLS = 512
"""At most this many cells a side; with more tiles, a cell stands for several, in their mean colour."""

_MASKED, _PARTIAL, _ALLOWED = "#eef0f4", "#8fb8de", "#1f4e8c"
_FAINTEST = 0.35
"""The weight of the tiles of a cell that are not empty, at least: one of hundreds can still be seen."""


@dataclass(frozen=True, slots=True, eq=False)
class _Picture:
    """`pixels` are indices into `colours`, uint8 (rows, columns), or colours, float (rows, columns, 3)."""

    pixels: Any
    colours: tuple[str, ...]
    labels: tuple[str, ...]
    caption: str


def plot_mask(
    mask: Callable[..., Any],
    Q_LEN: int,
    KV_LEN: int,
    *,
    b: int = 0,
    h: int = 0,
    block: bool = False,
    block_size: int = 128,
    ax: Axes | None = None,
) -> Figure:
    """Draws the pairs that `mask` allows for one batch and head; queries go down, keys to the right.

    Args:
        mask: a MaskMod or a plain function `f(b, h, q_idx, kv_idx)`.
        Q_LEN: the number of queries.
        KV_LEN: the number of keys.
        b: the batch.
        h: the query head.
        block: draw empty, partial and full tiles. Also done, with a note in the title, when there are more
            than `MAX_PAIRS` pairs. With more than `MAX_CELLS` tiles a side, cells of several tiles are drawn
            in their mean colour, so that a mask of a million tokens costs no more than its block map.
        block_size: the side of a tile.
        ax: where to draw; a new figure by default.

    Returns:
        The figure. It belongs to no global state: save it with `figure.savefig(path)`.

    Raises:
        MissingPackage: matplotlib is not installed.
        TraceError: the mask can't be traced.
        UnknownOption: `block_size` is not positive.
        MaskTooOpen: too many tiles can be told from nothing but their pairs.
    """
    if block_size < 1:
        raise UnknownOption(f"block_size is {block_size}", hint="the side of a tile is at least 1")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("plots need matplotlib", hint="pip install 'flexc[plot]'") from error

    view = plane(mask, Q_LEN, KV_LEN, b=b, h=h)
    by_tiles = block or Q_LEN * KV_LEN > MAX_PAIRS
    picture = _tiles(view, block_size) if by_tiles else _pairs(view)
    if ax is None:
        figure = Figure(figsize=(6.0, 6.0), layout="constrained")
        ax = figure.add_subplot()
    _draw(ax, view, picture)
    drawn = ax.get_figure(root=True)
    if drawn is None:
        raise UnknownOption("ax belongs to no figure", hint="pass an axes of a figure, or none")
    return drawn


def _pairs(view: Plane) -> _Picture:
    allowed = view.grid()
    share = float(allowed.mean()) if allowed.size else 0.0
    return _Picture(
        pixels=allowed.astype(np.uint8),
        colours=(_MASKED, _ALLOWED),
        labels=("masked", "may attend"),
        caption=f"{share:.1%} of {allowed.size:,} pairs may attend",
    )


def _tiles(view: Plane, block: int) -> _Picture:
    block_map = view.block_map(block, block)
    empty, partial, full = block_map.counts()
    caption = f"tiles of {block} x {block}: {empty:,} empty, {partial:,} partial, {full:,} full"
    cells = overview(block_map, MAX_CELLS, MAX_CELLS)
    one_a_cell = cells.row_step == cells.column_step == 1
    if not one_a_cell:
        caption += f"\na cell is the mean of {cells.row_step} x {cells.column_step} tiles"
    return _Picture(
        pixels=_kinds(cells) if one_a_cell else _mean_colours(cells),
        colours=_by_kind({TileKind.EMPTY: _MASKED, TileKind.PARTIAL: _PARTIAL, TileKind.FULL: _ALLOWED}),
        labels=_by_kind({kind: kind.name.lower() for kind in TileKind}),
        caption=caption,
    )


def _kinds(cells: Overview) -> Any:
    """The kind of each cell of one tile."""
    return (cells.partial * int(TileKind.PARTIAL) + cells.full * int(TileKind.FULL)).astype(np.uint8)


def _mean_colours(cells: Overview) -> Any:
    """The mean colour of the tiles of each cell; few visited ones count for more."""
    from matplotlib.colors import to_rgb

    masked, partial, allowed = (np.asarray(to_rgb(colour)) for colour in (_MASKED, _PARTIAL, _ALLOWED))
    visited = cells.partial + cells.full
    share = np.where(visited > 0, np.maximum(visited / cells.tiles, _FAINTEST), 0.0)[..., None]
    full = (cells.full / np.maximum(visited, 1))[..., None]
    return (1 - share) * masked + share * (full * allowed + (1 - full) * partial)


def _by_kind(table: dict[TileKind, str]) -> tuple[str, ...]:
    return tuple(table[kind] for kind in sorted(table))


def _draw(ax: Axes, view: Plane, picture: _Picture) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap(list(picture.colours))
    if picture.pixels.size:
        ax.imshow(
            picture.pixels,
            cmap=colours,
            vmin=0,
            vmax=len(picture.colours) - 1,
            interpolation="nearest",
            extent=(0, view.kv_len, view.q_len, 0),
        )
    for axis, name in ((ax.xaxis, "kv_idx"), (ax.yaxis, "q_idx")):
        axis.set_label_text(name)
        axis.set_major_formatter("{x:,.0f}")
    ax.set_title(f"{view.source.name}\n{picture.caption}", fontsize=10)
    patches = [Patch(color=c, label=text) for c, text in zip(picture.colours, picture.labels, strict=True)]
    ax.legend(handles=patches, loc="upper right", fontsize=8, framealpha=0.9)
