"""Keys in shuffled pages: the mask is written in logical positions and reads the page table itself."""

from __future__ import annotations

import torch

import flexc

PAGE = 16


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = 512
    pages = length // PAGE
    logical_page = torch.randperm(pages, device=device).int()  # by physical page

    def in_logical_order(mask):
        @flexc.mask_mod
        def physical(b, h, q_idx, kv_idx):
            return mask(b, h, q_idx, logical_page[kv_idx // PAGE] * PAGE + kv_idx % PAGE)

        return physical

    q, k, v = (torch.randn(1, 4, length, 64, device=device) for _ in range(3))
    where = logical_page.long()[:, None] * PAGE + torch.arange(PAGE, device=device)
    k_cache, v_cache = k[:, :, where.flatten()], v[:, :, where.flatten()]

    out = flexc.attention(q, k_cache, v_cache, mask_mod=in_logical_order(flexc.masks.sliding_window(100)))

    expected = flexc.attention(q, k, v, mask_mod=flexc.masks.sliding_window(100))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    print(f"{pages} pages of {PAGE} keys in any order give the same result as keys in order")


if __name__ == "__main__":
    main()
