"""ALiBi: a score function that reads a captured tensor, one slope a head."""

from __future__ import annotations

import torch

import flexc


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads, length = 8, 512
    slopes = torch.exp2(-torch.arange(1.0, heads + 1, device=device))
    q, k, v = (torch.randn(1, heads, length, 64, device=device) for _ in range(3))

    @flexc.score_mod
    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    out = flexc.attention(q, k, v, score_mod=alibi, mask_mod=flexc.masks.causal)

    index = torch.arange(length, device=device)
    bias = slopes[:, None, None] * (index[None, :] - index[:, None])
    bias = bias.masked_fill(index[None, :] > index[:, None], float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    print(f"ALiBi on {device}: largest difference from PyTorch {(out - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
