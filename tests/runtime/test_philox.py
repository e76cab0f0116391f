"""The random bits of dropout: the published test vectors, and how often a pair is kept."""

from __future__ import annotations

import pytest
import torch

from flexc.philox import LEVELS, dropped_of, kept, random_words, survivors_weight

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (7, (0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        (7, (ONES, ONES), ONES, (0xAB302C4D, 0x3DC9D239)),
        (7, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
        (10, (0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        (10, (ONES, ONES), ONES, (0x2C3F628B, 0xAB4FD7AD)),
        (10, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_published_vectors(rounds: int, counter: tuple[int, int], key: int, words: tuple[int, int]) -> None:
    """Those that the authors' library comes with."""
    assert tuple(int(word) for word in random_words(key, *counter, rounds=rounds)) == words


def test_halves_of_two_words_belong_to_rows_and_columns_eight_apart() -> None:
    key, offset = random_words(99, 2, 7)
    words = random_words(key, 3 + offset & ONES, 5)
    keep = kept(99 | 7 << 32, 0.5, torch.tensor(2), torch.tensor([[3], [11]]), torch.tensor([5, 13]))
    halves = [half for word in words for half in (int(word) & 0xFFFF, int(word) >> 16)]
    assert keep.flatten().tolist() == [half >= 2**15 for half in halves]


def test_pairs_are_kept_independently_and_as_often_as_asked() -> None:
    stream = torch.arange(6).view(6, 1, 1)
    q_idx, kv_idx = torch.arange(200).view(200, 1), torch.arange(300)
    for probability in (0.1, 0.5, 0.9):
        keep = kept(1234, probability, stream, q_idx, kv_idx)
        assert keep.shape == (6, 200, 300)
        for axis in ((1, 2), (0, 2), (0, 1)):
            share = keep.double().mean(axis)
            deviation = (probability * (1 - probability) * share.numel() / keep.numel()) ** 0.5
            assert ((share - (1 - probability)).abs() < 6 * deviation).all()
        part = kept(1234, probability, stream[2:3], q_idx[50:60], kv_idx[7:90])
        assert torch.equal(part, keep[2:3, 50:60, 7:90])
        assert not torch.equal(kept(1235, probability, stream, q_idx, kv_idx), keep)
        assert not torch.equal(kept(1234 + (1 << 32), probability, stream, q_idx, kv_idx), keep)


def test_the_ends() -> None:
    one, pairs = torch.zeros(1), torch.arange(1000)
    assert kept(7, 0.0, one, one, pairs).all()
    assert not kept(7, 1.0, one, one, pairs).any()
    assert survivors_weight(0.0) == 1.0
    assert survivors_weight(1.0) == 0.0
    assert survivors_weight(0.75) == 4.0


def test_probabilities_are_rounded_and_the_expected_sum_stays() -> None:
    for probability in (1e-9, 0.1, 1 / 3, 0.99, 1 - 1e-9):
        dropped = dropped_of(probability)
        assert abs(dropped / LEVELS - probability) <= 0.5 / LEVELS
        assert survivors_weight(probability) * (LEVELS - dropped) == pytest.approx(
            LEVELS if dropped < LEVELS else 0
        )


def test_neighbours_and_heads_are_independent() -> None:
    """Pairs that share a word, that are next to each other, or of other heads agree as often as by chance."""
    probability = 0.3
    keep = kept(
        2**40 + 5,
        probability,
        torch.arange(4).view(4, 1, 1),
        torch.arange(512).view(512, 1),
        torch.arange(512),
    )
    agree = probability**2 + (1 - probability) ** 2
    for h, q, kv in (
        (0, 0, 1),
        (0, 1, 0),
        (0, 0, 8),
        (0, 8, 0),
        (0, 8, 8),
        (0, 16, 0),
        (0, 0, 64),
        (1, 0, 0),
        (2, 0, 8),
    ):
        one, other = keep[h:, q:, kv:], keep[: 4 - h, : 512 - q, : 512 - kv]
        deviation = (agree * (1 - agree) / one.numel()) ** 0.5
        assert abs(float((one == other).double().mean()) - agree) < 5 * deviation, (h, q, kv)
