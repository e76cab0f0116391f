"""Which attention weights dropout drops: random bits of a pair's own, the same on every backend.

The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011). A pair's counter is `(kv_idx, q_idx, b * Hq + h, 0)`, the key is the 64-bit seed, low word first, and
word 0 of the result counts. Nothing depends on tiles, threads or the order of evaluation, so that a backward
asks again instead of remembering.
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def random_words(
    seed: int, counter: tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor | int, torch.Tensor | int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit words of Philox4x32-10, in int64 tensors of the counter's broadcast shape.

    `counter` is four words from 0 to 2**32 - 1, int64 tensors or numbers; `seed` is 64 bits.
    """
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # Products of two words wrap to 64 bits; all of them are right as unsigned numbers.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32) & _WORD ^ c1 ^ key_0
        c2 = (first >> 32) & _WORD ^ c3 ^ key_1
        c1, c3 = second & _WORD, first & _WORD
        key_0, key_1 = (key_0 + _WEYL[0]) & _WORD, (key_1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


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
    counter = (kv_idx.to(torch.int64), q_idx.to(torch.int64), stream.to(torch.int64), 0)
    return random_words(seed, counter)[0] >= int(probability * 2**32)


def survivors_weight(probability: float) -> float:
    """The factor of what is kept, so that the expected sum stays: `1 / (1 - p)`; 0 where nothing is kept."""
    return 0.0 if probability >= 1.0 else 1.0 / (1.0 - probability)
