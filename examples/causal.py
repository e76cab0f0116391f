"""Causal attention: a mask is a Python function of four integers."""

from __future__ import annotations

import torch

import flexc


@flexc.mask_mod
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(2, 8, 1000, 64, device=device)  # batch, query heads, queries, head dimension
    k = torch.randn(2, 2, 1000, 64, device=device)  # two kv heads: each serves a group of four query heads
    v = torch.randn(2, 2, 1000, 64, device=device)

    out, lse = flexc.attention(q, k, v, mask_mod=causal, return_lse=True)

    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    print(f"causal on {device}: out {tuple(out.shape)}, lse {tuple(lse.shape)}")
    print(f"largest difference from PyTorch: {(out - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
