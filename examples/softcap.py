"""Soft-capped scores: any arithmetic on the score, in fp32."""

from __future__ import annotations

import torch

import flexc


@flexc.score_mod
def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (4 * torch.randn(1, 4, 300, 80, device=device) for _ in range(3))

    out = flexc.attention(q, k, v, score_mod=softcap)

    scores = q @ k.transpose(-1, -2) / 80**0.5
    expected = torch.softmax(20.0 * torch.tanh(scores / 20.0), dim=-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    print(f"soft cap on {device}: largest score {scores.max():.0f}, capped at 20")
    print(f"largest difference from PyTorch: {(out - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
