"""Neighbourhood attention over an image: each pixel sees the 7 x 7 pixels around it."""

from __future__ import annotations

import torch

import flexc

HEIGHT, WIDTH, RADIUS = 32, 48, 3


@flexc.mask_mod
def neighbourhood(b, h, q_idx, kv_idx):
    rows_apart = q_idx // WIDTH - kv_idx // WIDTH
    columns_apart = q_idx % WIDTH - kv_idx % WIDTH
    return (abs(rows_apart) <= RADIUS) & (abs(columns_apart) <= RADIUS)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels = HEIGHT * WIDTH
    q, k, v = (torch.randn(1, 4, pixels, 32, device=device) for _ in range(3))

    out = flexc.attention(q, k, v, mask_mod=neighbourhood)

    dense = flexc.create_mask(neighbourhood, 1, 1, pixels, pixels, device=device)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    corner, middle = dense[0, 0, 0].sum(), dense[0, 0, pixels // 2 + WIDTH // 2].sum()
    print(f"{HEIGHT} x {WIDTH} pixels: a corner sees {corner} of them, the middle {middle}")
    print(f"largest difference from PyTorch: {(out - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
