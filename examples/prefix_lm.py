"""Prefix-LM: the prompt sees itself in both directions, the rest is causal; one prompt a request."""

from __future__ import annotations

import torch

import flexc


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompt = torch.tensor([100, 37, 0], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(3, 4, 256, 64, device=device) for _ in range(3))

    @flexc.mask_mod
    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < prompt[b]) | (q_idx >= kv_idx)

    out = flexc.attention(q, k, v, mask_mod=prefix_lm)

    dense = flexc.create_mask(prefix_lm, 3, 1, 256, 256, device=device)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for request, length in enumerate(prompt.tolist()):
        seen = int(dense[request, 0, 0].sum())
        print(f"request {request}: prompt of {length}, its first token sees {seen} keys")


if __name__ == "__main__":
    main()
