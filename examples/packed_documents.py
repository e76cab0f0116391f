"""Documents packed into one sequence: attention stays inside each, and nothing of size S x S is ever made."""

from __future__ import annotations

import torch

import flexc


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = torch.tensor([700, 12, 1300, 1, 350, 1685], device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths).int()
    total = len(document)

    @flexc.mask_mod
    def packed(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    q, k, v = (torch.randn(1, 4, total, 64, device=device) for _ in range(3))
    out = flexc.attention(q, k, v, mask_mod=packed)

    start = 0
    for length in lengths.tolist():
        part = slice(start, start + length)
        alone = flexc.attention(q[:, :, part], k[:, :, part], v[:, :, part], mask_mod=flexc.masks.causal)
        torch.testing.assert_close(out[:, :, part], alone, rtol=1e-4, atol=1e-4)
        start += length
    print(packed.explain(total, total))
    print(f"each of the {len(lengths)} documents equals attention on it alone")


if __name__ == "__main__":
    main()
