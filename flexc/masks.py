"""Ready-made masks. Each is a plain function of `(b, h, q_idx, kv_idx)` that any mask can be composed with.

>>> from flexc import masks
>>> packed = masks.causal & masks.document(doc_ids)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexc.check import check_is_tensor
from flexc.errors import InvalidMask
from flexc.mods import MaskMod, made_again, mask_mod

if TYPE_CHECKING:
    import torch

__all__ = [
    "block_diffusion",
    "causal",
    "chunked",
    "dilated",
    "document",
    "document_from_cu_seqlens",
    "global_tokens",
    "natten2d",
    "natten3d",
    "prefix_lm",
    "sliding_tile_2d",
    "sliding_tile_3d",
    "sliding_window",
    "tree",
]


@mask_mod
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Every query sees its own key and the earlier ones."""
    return q_idx >= kv_idx


@made_again
def sliding_window(W: int) -> MaskMod:
    """Causal, the last `W` keys, self included: `q_idx - W < kv_idx <= q_idx`.

    This is the convention of Hugging Face. attention-gym keeps W + 1 keys.
    """

    @mask_mod
    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < W)

    return sliding_window


@made_again
def prefix_lm(P: int | torch.Tensor) -> MaskMod:
    """The first `P` keys are seen by all queries, the others causally.

    Args:
        P: length of the prefix, or one a batch entry, shape (B,).
    """
    if isinstance(P, int):

        @mask_mod
        def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx < P) | (q_idx >= kv_idx)

        return prefix_lm

    @mask_mod
    def prefix_lm_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < P[b]) | (q_idx >= kv_idx)

    return prefix_lm_batch


@made_again
def document(doc_ids: torch.Tensor) -> MaskMod:
    """A query sees the keys of its own document. Compose with `causal` for packed language modelling.

    Args:
        doc_ids: the document of each position, integers of shape (S,), or (B, S) for one packing a batch
            entry.
    """
    check_is_tensor("doc_ids", doc_ids)
    if doc_ids.ndim == 2:

        @mask_mod
        def document_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return doc_ids[b, q_idx] == doc_ids[b, kv_idx]

        return document_batch

    @mask_mod
    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return doc_ids[q_idx] == doc_ids[kv_idx]

    return document


@made_again
def document_from_cu_seqlens(cu_seqlens: torch.Tensor) -> MaskMod:
    """A query sees the keys of its own document; documents are packed one after another.

    Args:
        cu_seqlens: where each document starts, and the total length at the end: `[0, 3, 10, 12]` for
            documents of 3, 7
            and 2 tokens. Integers of shape (documents + 1,), not decreasing. Reads the total on the host,
            once.
    """
    import torch

    check_is_tensor("cu_seqlens", cu_seqlens)
    lengths = cu_seqlens.diff()
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or cu_seqlens[0] != 0 or (lengths < 0).any():
        raise InvalidMask(
            f"cu_seqlens is {cu_seqlens.tolist()}"[:200], hint="ascending, from 0 to the total length"
        )
    first_of = torch.repeat_interleave(cu_seqlens[:-1], lengths).to(torch.int32)
    end_of = torch.repeat_interleave(cu_seqlens[1:], lengths).to(torch.int32)

    @mask_mod
    def document_from_cu_seqlens(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (first_of[q_idx] <= kv_idx) & (kv_idx < end_of[q_idx])

    return document_from_cu_seqlens


@made_again
def chunked(C: int) -> MaskMod:
    """Causal within chunks of `C` positions; nothing crosses a chunk's border."""
    _check_positive(C=C)

    @mask_mod
    def chunked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx // C == kv_idx // C)

    return chunked


@made_again
def dilated(W: int, d: int) -> MaskMod:
    """Causal, `W` keys at a stride of `d`, self included: distances 0, d, 2d, ... (W - 1) d."""
    _check_positive(d=d)

    @mask_mod
    def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < W * d) & (distance % d == 0)

    return dilated


@made_again
def global_tokens(is_global: torch.Tensor, W: int) -> MaskMod:
    """Longformer (Beltagy et al., 2020): a window of `W` positions to either side, and global tokens.

    Global tokens see every key and are seen by every query. Not causal: compose with `causal` for a decoder.

    Args:
        is_global: which positions are global, bool of shape (S,).
        W: positions at a distance of at most W are in the window.
    """
    check_is_tensor("is_global", is_global)

    @mask_mod
    def global_tokens(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx <= W) & (kv_idx - q_idx <= W)
        return near | is_global[q_idx] | is_global[kv_idx]

    return global_tokens


@made_again
def natten2d(height: int, width: int, kernel: int | tuple[int, int]) -> MaskMod:
    """Neighbourhood attention (Hassani et al., 2023) over an image in row-major order.

    A query at (y, x) sees the `kernel` keys around it; at the border the window is pushed inside, so that
    every query sees the same number of keys.

    Args:
        height: rows of the image.
        width: columns of the image; positions are `y * width + x`.
        kernel: odd window size, or (rows, columns); at most the image.
    """
    kernel_h, kernel_w = (kernel, kernel) if isinstance(kernel, int) else kernel
    _check_windows("kernel", (kernel_h, kernel_w), (height, width))
    half_h, half_w = kernel_h // 2, kernel_w // 2

    @mask_mod
    def natten2d(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        centre_y = (q_idx // width).clamp(half_h, height - 1 - half_h)
        centre_x = (q_idx % width).clamp(half_w, width - 1 - half_w)
        dy = kv_idx // width - centre_y
        dx = kv_idx % width - centre_x
        return (dy >= -half_h) & (dy <= half_h) & (dx >= -half_w) & (dx <= half_w)

    return natten2d


@made_again
def natten3d(depth: int, height: int, width: int, kernel: int | tuple[int, int, int]) -> MaskMod:
    """Neighbourhood attention over a video or volume.

    As `natten2d`, positions `(z * height + y) * width + x`.
    """
    kernel_d, kernel_h, kernel_w = (kernel, kernel, kernel) if isinstance(kernel, int) else kernel
    _check_windows("kernel", (kernel_d, kernel_h, kernel_w), (depth, height, width))
    half_d, half_h, half_w = kernel_d // 2, kernel_h // 2, kernel_w // 2

    @mask_mod
    def natten3d(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        centre_z = (q_idx // (height * width)).clamp(half_d, depth - 1 - half_d)
        centre_y = (q_idx // width % height).clamp(half_h, height - 1 - half_h)
        centre_x = (q_idx % width).clamp(half_w, width - 1 - half_w)
        dz = kv_idx // (height * width) - centre_z
        dy = kv_idx // width % height - centre_y
        dx = kv_idx % width - centre_x
        inside_z = (dz >= -half_d) & (dz <= half_d)
        inside_y = (dy >= -half_h) & (dy <= half_h)
        inside_x = (dx >= -half_w) & (dx <= half_w)
        return inside_z & inside_y & inside_x

    return natten3d


@made_again
def sliding_tile_2d(height: int, width: int, tile: tuple[int, int], window: tuple[int, int]) -> MaskMod:
    """Sliding tile attention (Zhang et al., 2025) over an image: whole tiles see whole tiles.

    Positions are in tile order: tile by tile, and row-major within a tile, so that every tile is one run of
    positions.

    Args:
        height: rows, a multiple of `tile[0]`.
        width: columns, a multiple of `tile[1]`.
        tile: rows and columns of a tile.
        window: odd numbers of tiles that a tile sees around itself, pushed inside at the border.
    """
    _check_tiles(tile, (height, width))
    tiles_h, tiles_w = height // tile[0], width // tile[1]
    _check_windows("window", window, (tiles_h, tiles_w))
    tile_size = tile[0] * tile[1]
    half_h, half_w = window[0] // 2, window[1] // 2

    @mask_mod
    def sliding_tile_2d(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // tile_size, kv_idx // tile_size
        dy = kv_tile // tiles_w - (q_tile // tiles_w).clamp(half_h, tiles_h - 1 - half_h)
        dx = kv_tile % tiles_w - (q_tile % tiles_w).clamp(half_w, tiles_w - 1 - half_w)
        return (dy >= -half_h) & (dy <= half_h) & (dx >= -half_w) & (dx <= half_w)

    return sliding_tile_2d


@made_again
def sliding_tile_3d(
    depth: int, height: int, width: int, tile: tuple[int, int, int], window: tuple[int, int, int]
) -> MaskMod:
    """Sliding tile attention over a video: as `sliding_tile_2d`, with frames first."""
    _check_tiles(tile, (depth, height, width))
    tiles_d, tiles_h, tiles_w = depth // tile[0], height // tile[1], width // tile[2]
    _check_windows("window", window, (tiles_d, tiles_h, tiles_w))
    tile_size = tile[0] * tile[1] * tile[2]
    half_d, half_h, half_w = window[0] // 2, window[1] // 2, window[2] // 2

    @mask_mod
    def sliding_tile_3d(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // tile_size, kv_idx // tile_size
        dz = kv_tile // (tiles_h * tiles_w) - (q_tile // (tiles_h * tiles_w)).clamp(
            half_d, tiles_d - 1 - half_d
        )
        dy = kv_tile // tiles_w % tiles_h - (q_tile // tiles_w % tiles_h).clamp(half_h, tiles_h - 1 - half_h)
        dx = kv_tile % tiles_w - (q_tile % tiles_w).clamp(half_w, tiles_w - 1 - half_w)
        inside_z = (dz >= -half_d) & (dz <= half_d)
        inside_y = (dy >= -half_h) & (dy <= half_h)
        inside_x = (dx >= -half_w) & (dx <= half_w)
        return inside_z & inside_y & inside_x

    return sliding_tile_3d


@made_again
def block_diffusion(L: int, bs: int) -> MaskMod:
    """Training mask of block diffusion (Arriola et al., 2025, section 3.1) over `2 L` positions.

    The first `L` positions are the noised sequence, the last `L` the clean one, both in blocks of `bs`. A
    noised token sees its own noised block and the clean blocks before it; a clean token sees the clean blocks
    up to its own.
    """
    _check_positive(L=L, bs=bs)

    @mask_mod
    def block_diffusion(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_clean, kv_clean = q_idx >= L, kv_idx >= L
        q_block, kv_block = q_idx % L // bs, kv_idx % L // bs
        own_noised = ~q_clean & ~kv_clean & (q_block == kv_block)
        earlier_clean = ~q_clean & kv_clean & (kv_block < q_block)
        clean = q_clean & kv_clean & (kv_block <= q_block)
        return own_noised | earlier_clean | clean

    return block_diffusion


@made_again
def tree(ancestors: torch.Tensor) -> MaskMod:
    """Verification of a tree of draft tokens: a query sees its path to the root, and the context.

    With T draft tokens, the keys are a context of any length, then the T tokens; the queries are the T
    tokens.

    Args:
        ancestors: bool of shape (T, context + T): `ancestors[i, j]` is True where token i sees key j. A
            square
            (T, T) tensor serves when there is no context. Also (B, T, context + T), one tree a batch entry.
    """
    check_is_tensor("ancestors", ancestors)
    if ancestors.ndim == 3:

        @mask_mod
        def tree_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return ancestors[b, q_idx, kv_idx]

        return tree_batch

    @mask_mod
    def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ancestors[q_idx, kv_idx]

    return tree


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise InvalidMask(f"{name} is {number}", hint=f"{name} is at least 1")


def _check_windows(name: str, windows: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Every window is odd, and no wider than what it slides over."""
    fit = all(w % 2 == 1 and 1 <= w <= size for w, size in zip(windows, sizes, strict=True))
    if not fit:
        raise InvalidMask(f"{name} {windows} over {sizes}", hint="odd numbers, at most the sizes")


def _check_tiles(tile: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if not all(t >= 1 and size % t == 0 for t, size in zip(tile, sizes, strict=True)):
        raise InvalidMask(f"tiles of {tile} over {sizes}", hint="each size is a multiple of the tile's")
