"""A sliding window, composed of two masks; its size is a run-time value: changing it compiles nothing."""

from __future__ import annotations

import torch

import flexc


def window(size):
    @flexc.mask_mod
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    return near


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 4, 2048, 64, device=device) for _ in range(3))

    for size in (64, 256, 1024):
        mask = flexc.masks.causal & window(size)
        out = flexc.attention(q, k, v, mask_mod=mask)
        tiles = mask.block_mask(1, 1, 2048, 2048, device=device)
        print(f"window {size:4}: {tiles.sparsity():.1f} % of the tiles are never read")

        dense = flexc.create_mask(mask, 1, 1, 2048, 2048, device=device)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
