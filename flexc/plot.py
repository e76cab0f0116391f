"""Pictures of masks. The cost is bounded: a long mask is drawn by its tiles, which the analyses decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flexc.errors import MissingPackage, UnknownOption
from flexc.ir.blockmap import TileKind
from flexc.plane import Plane, plane

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PAIRS = 1 << 22
"""Above this many pairs (2048 x 2048) a mask is drawn by tiles, not pair by pair."""

MAX_TILES = 1024
"""At most this many tiles a side; blocks are doubled until they fit."""

_MASKED, _PARTIAL, _ALLOWED = "#eef0f4", "#8fb8de", "#1f4e8c"


@dataclass(frozen=True, slots=True, eq=False)
class _Picture:
    pixels: Any  # uint8 (rows, columns): indices into `colours`
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
            than `MAX_PAIRS` pairs.
        block_size: the side of a tile; doubled while there are more than `MAX_TILES` a side.
        ax: where to draw; a new figure by default.

    Returns:
        The figure. It belongs to no global state: save it with `figure.savefig(path)`.

    Raises:
        MissingPackage: matplotlib is not installed.
        TraceError: the mask can't be traced.
        UnknownOption: `block_size` is not positive.
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
    while max(view.q_len, view.kv_len) > block * MAX_TILES:
        block *= 2
    block_map = view.block_map(block, block)
    empty, partial, full = block_map.counts()
    return _Picture(
        pixels=np.asarray(block_map.kinds(), dtype=np.uint8),
        colours=_by_kind({TileKind.EMPTY: _MASKED, TileKind.PARTIAL: _PARTIAL, TileKind.FULL: _ALLOWED}),
        labels=_by_kind({kind: kind.name.lower() for kind in TileKind}),
        caption=f"tiles of {block} x {block}: {empty:,} empty, {partial:,} partial, {full:,} full",
    )


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
    ax.set_xlabel("kv_idx")
    ax.set_ylabel("q_idx")
    ax.set_title(f"{view.source.name}\n{picture.caption}", fontsize=10)
    patches = [Patch(color=c, label=text) for c, text in zip(picture.colours, picture.labels, strict=True)]
    ax.legend(handles=patches, loc="upper right", fontsize=8, framealpha=0.9)
