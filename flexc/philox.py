"""Which attention weights dropout drops: random bits of a pair's own, the same on every backend.

The generator is Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (2011), with the fewest rounds that passed every test there. Its key is the 64-bit seed, low word first.
The counter `(kv_half, q_half, b * Hq + h, 0)`, where a half is the index without its bit 3, gives four
words: those of the pairs of two rows and two columns that are 8 apart, which one thread of a matrix
instruction holds. Word `2 * bit 3 of q_idx + bit 3 of kv_idx` is that of a pair. Nothing depends on tiles,
threads or the order of evaluation, so that a backward asks again instead of remembering.
"""

from __future__ import annotations

import torch

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def random_words(
    seed: int,
    counter: tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor | int, torch.Tensor | int],
    rounds: int = ROUNDS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit words of Philox4x32, in int64 tensors of the counter's broadcast shape.

    `counter` is four words from 0 to 2**32 - 1, int64 tensors or numbers; `seed` is 64 bits.
    """
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
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
    q_idx, kv_idx = q_idx.to(torch.int64), kv_idx.to(torch.int64)
    words = random_words(seed, (_half(kv_idx), _half(q_idx), stream.to(torch.int64), 0))
    late = (kv_idx & 8) > 0
    word = torch.where(
        (q_idx & 8) > 0, torch.where(late, words[3], words[2]), torch.where(late, words[1], words[0])
    )
    return word >= int(probability * 2**32)


def _half(index: torch.Tensor) -> torch.Tensor:
    """An index without its bit 3: counted along with that of the row or column 8 further on."""
    return (index >> 4 << 3) | (index & 7)


def survivors_weight(probability: float) -> float:
    """The factor of what is kept, so that the expected sum stays: `1 / (1 - p)`; 0 where nothing is kept."""
    return 0.0 if probability >= 1.0 else 1.0 / (1.0 - probability)
