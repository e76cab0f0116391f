"""The ready-made masks and score functions against their definitions in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexc import masks, scores
from flexc.errors import InvalidMask, UnsupportedDtype
from flexc.mods import MaskMod
from tests.frontend.direct import run_directly, run_graph


def equals(
    mask: MaskMod, q_len: int, kv_len: int, allowed: Callable[[int, int], bool], batch: int = 1
) -> None:
    """The mask on every pair, traced and called, is `allowed(q, k)`."""
    shape = (batch, 1, q_len, kv_len)
    expected = torch.tensor([[allowed(q, k) for k in range(kv_len)] for q in range(q_len)])
    assert torch.equal(run_graph(mask.trace(), shape)[0, 0], expected)
    assert torch.equal(run_directly(mask, shape)[0, 0], expected)


def test_causal_and_windows() -> None:
    equals(masks.causal, 9, 11, lambda q, k: k <= q)
    equals(masks.sliding_window(3), 11, 11, lambda q, k: k in (q, q - 1, q - 2))
    equals(masks.sliding_window(1), 11, 11, lambda q, k: k == q)
    equals(masks.chunked(4), 11, 11, lambda q, k: k <= q and q // 4 == k // 4)
    equals(masks.dilated(3, 2), 11, 11, lambda q, k: q - k in (0, 2, 4))
    equals(masks.prefix_lm(3), 11, 11, lambda q, k: k < 3 or k <= q)
    equals(masks.prefix_lm(torch.tensor([3])), 11, 11, lambda q, k: k < 3 or k <= q)


def test_documents() -> None:
    ids = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    same = lambda q, k: ids[q] == ids[k]  # noqa: E731
    equals(masks.document(torch.tensor(ids)), 9, 9, same)
    equals(masks.document(torch.tensor([ids, ids])), 9, 9, same, batch=2)
    equals(masks.document_from_cu_seqlens(torch.tensor([0, 3, 3, 5, 9])), 9, 9, same)


def test_global_tokens() -> None:
    special = [True, False, False, False, False, False, True, False]
    mask = masks.global_tokens(torch.tensor(special), 1)
    equals(mask, 8, 8, lambda q, k: abs(q - k) <= 1 or special[q] or special[k])


def neighbours(position: int, length: int, size: int) -> range:
    """The `size` positions around one, pushed inside."""
    start = min(max(position - size // 2, 0), length - size)
    return range(start, start + size)


def test_neighbourhoods() -> None:
    def near_2d(q: int, k: int) -> bool:
        return k // 6 in neighbours(q // 6, 5, 3) and k % 6 in neighbours(q % 6, 6, 5)

    equals(masks.natten2d(5, 6, (3, 5)), 30, 30, near_2d)

    def near_3d(q: int, k: int) -> bool:
        inside = k // 12 in neighbours(q // 12, 3, 3) and k // 4 % 3 in neighbours(q // 4 % 3, 3, 1)
        return inside and k % 4 in neighbours(q % 4, 4, 3)

    equals(masks.natten3d(3, 3, 4, (3, 1, 3)), 36, 36, near_3d)


def test_sliding_tiles() -> None:
    def near_2d(q: int, k: int) -> bool:
        q_tile, k_tile = q // 4, k // 4
        return k_tile // 4 in neighbours(q_tile // 4, 3, 3) and k_tile % 4 in neighbours(q_tile % 4, 4, 1)

    equals(masks.sliding_tile_2d(6, 8, (2, 2), (3, 1)), 48, 48, near_2d)

    def near_3d(q: int, k: int) -> bool:
        q_tile, k_tile = q // 2, k // 2
        inside = k_tile // 6 in neighbours(q_tile // 6, 2, 1) and k_tile // 3 % 2 in neighbours(
            q_tile // 3 % 2, 2, 1
        )
        return inside and k_tile % 3 in neighbours(q_tile % 3, 3, 3)

    equals(masks.sliding_tile_3d(2, 2, 6, (1, 1, 2), (1, 1, 3)), 24, 24, near_3d)


def test_block_diffusion() -> None:
    def allowed(q: int, k: int) -> bool:
        q_block, k_block = q % 9 // 4, k % 9 // 4
        if q < 9:
            return q_block == k_block if k < 9 else k_block < q_block
        return k >= 9 and k_block <= q_block

    equals(masks.block_diffusion(9, 4), 18, 18, allowed)


def test_tree() -> None:
    table = torch.rand(4, 9) < 0.5
    equals(masks.tree(table), 4, 9, lambda q, k: bool(table[q, k]))
    equals(masks.tree(table[None]), 4, 9, lambda q, k: bool(table[q, k]))


def test_scores() -> None:
    shape = (1, 2, 7, 9)
    score = torch.randn(shape)
    q, k = torch.arange(7)[:, None], torch.arange(9)
    slopes, table, heads = torch.tensor([0.5, 0.25]), torch.randn(2, 5), torch.tensor([0.5, 2.0])

    def check(mod: Any, expected: torch.Tensor) -> None:
        torch.testing.assert_close(run_graph(mod.trace(), shape, score), expected)
        torch.testing.assert_close(run_directly(mod, shape, score), expected)

    check(scores.alibi(slopes), score - slopes[:, None, None] * (q - k))
    check(scores.softcap(3.0), 3 * torch.tanh(score / 3))
    check(scores.relative_bias(table), score + table[:, (q - k + 2).clamp(0, 4)])
    check(scores.temperature(0.5), score * 2)
    check(scores.temperature(torch.tensor(0.5)), score * 2)
    check(scores.temperature(heads), score / heads[:, None, None])


def test_everything_is_listed_and_documented() -> None:
    for module in (masks, scores):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.chunked(0), "C is 0"),
        (lambda: masks.dilated(3, 0), "d is 0"),
        (lambda: masks.block_diffusion(8, 0), "bs is 0"),
        (lambda: masks.natten2d(5, 6, 2), "odd"),
        (lambda: masks.natten3d(3, 3, 4, 5), r"kernel \(5, 5, 5\) over"),
        (lambda: masks.sliding_tile_2d(5, 8, (2, 2), (1, 1)), "multiple"),
        (lambda: masks.sliding_tile_3d(2, 2, 6, (1, 1, 2), (1, 1, 5)), r"window \(1, 1, 5\) over"),
        (lambda: masks.document_from_cu_seqlens(torch.tensor([0, 5, 3])), "ascending"),
        (lambda: masks.document_from_cu_seqlens(torch.tensor([2, 5])), "from 0"),
    ],
)
def test_numbers_that_make_no_mask(make: Callable[[], MaskMod], message: str) -> None:
    with pytest.raises(InvalidMask, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.document([0, 0, 1]),  # type: ignore[arg-type]
        lambda: masks.document_from_cu_seqlens([0, 3]),  # type: ignore[arg-type]
        lambda: masks.global_tokens([True], 2),  # type: ignore[arg-type]
        lambda: masks.tree([[True]]),  # type: ignore[arg-type]
        lambda: scores.alibi([1.0, 0.5]),  # type: ignore[arg-type]
        lambda: scores.relative_bias([[1.0]]),  # type: ignore[arg-type]
    ],
    ids=("document", "cu_seqlens", "global", "tree", "alibi", "bias"),
)
def test_lists_in_place_of_tensors(make: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedDtype, match=r"must be a torch\.Tensor, not list"):
        make()
