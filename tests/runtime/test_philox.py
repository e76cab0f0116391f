"""The random bits of dropout: the published test vectors, and how often a pair is kept."""

from __future__ import annotations

import pytest
import torch

from flexc.philox import kept, random_words, survivors_weight

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Those that the authors' library comes with."""
    assert tuple(int(word) for word in random_words(key[0] | key[1] << 32, counter, rounds=10)) == words


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_published_vectors_of_seven_rounds(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in random_words(key[0] | key[1] << 32, counter)) == words


def test_four_words_belong_to_rows_and_columns_eight_apart() -> None:
    words = random_words(99, (5, 3, 2, 0))
    keep = kept(99, 0.5, torch.tensor(2), torch.tensor([[3], [11]]), torch.tensor([5, 13]))
    assert keep.flatten().tolist() == [bool(word >= 2**31) for word in words]


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
    assert survivors_weight(1.0) == 0.0
    assert survivors_weight(0.75) == 4.0
