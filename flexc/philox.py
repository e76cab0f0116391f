"""Which attention weights dropout drops: random bits of a pair's own, the same on every backend.

The generator is Philox2x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (2011), with the fewest rounds that passed every test there. Its key is one word. So that a seed may have
64 bits, it is asked twice: with the seed's low word as the key, `(b * Hq + h, high word)` gives a key and an
offset of that head; with this key, `(q_half + offset, kv_half)`, where a half is the index without its bit
3, gives two words. Their halves of 16 bits are those of the pairs of two rows and two columns that are 8
apart, which one thread of a matrix instruction holds: the word is that of the row's bit 3, and the lower
half comes first. Nothing depends on tiles, threads or the order of evaluation, so that a backward asks
again instead of remembering.
"""

from __future__ import annotations

import torch

ROUNDS = 7
LEVELS = 1 << 16
"""Probabilities are rounded to multiples of 1 over this."""
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_WORD = 0xFFFFFFFF


def random_words(
    key: torch.Tensor | int, x: torch.Tensor | int, y: torch.Tensor | int, rounds: int = ROUNDS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit words of Philox2x32, in int64 tensors of the arguments' broadcast shape.

    `key`, `x` and `y` are words from 0 to 2**32 - 1, int64 tensors or numbers.
    """
    key, x, y = (torch.as_tensor(word, dtype=torch.int64) for word in (key, x, y))
    for _ in range(rounds):
        # A product of two words wraps to 64 bits; all of them are right as an unsigned number.
        product = x * _MULTIPLIER
        x, y = (product >> 32) & _WORD ^ key ^ y, product & _WORD
        key = (key + _WEYL) & _WORD
    return x, y


def kept(
    seed: int, probability: float, stream: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    """Whether each pair keeps its weight: bool, of the arguments' broadcast shape.

    Args:
        seed: 64 bits.
        probability: that a pair is dropped, 0 to 1.
        stream: `b * Hq + h` of each pair.
        q_idx: its row.
        kv_idx: its column.
    """
    q_idx, kv_idx = q_idx.to(torch.int64), kv_idx.to(torch.int64)
    key, offset = random_words(seed & _WORD, stream.to(torch.int64), (seed >> 32) & _WORD)
    early, late = random_words(key, (_half(q_idx) + offset) & _WORD, _half(kv_idx))
    word = torch.where((q_idx & 8) > 0, late, early)
    return torch.where((kv_idx & 8) > 0, word >> 16, word & 0xFFFF) >= dropped_of(probability)


def _half(index: torch.Tensor) -> torch.Tensor:
    """An index without its bit 3: counted along with that of the row or column 8 further on."""
    return (index >> 4 << 3) | (index & 7)


def dropped_of(probability: float) -> int:
    """How many of `LEVELS` random numbers are dropped: the probability, as a whole number of these."""
    return round(probability * LEVELS)


def survivors_weight(probability: float) -> float:
    """The factor of what is kept, so that the expected sum stays: 1 / (1 - p), of the rounded probability.

    0 where nothing is kept.
    """
    left = LEVELS - dropped_of(probability)
    return LEVELS / left if left else 0.0
