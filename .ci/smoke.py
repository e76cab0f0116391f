"""Uses an installed flexc from a folder that is not its checkout: compute, compile, and the packaged data."""

from __future__ import annotations

from pathlib import Path

import torch

import flexc


def main() -> None:
    assert Path(flexc.__file__).with_name("ir").is_dir(), "the wheel holds the sub-packages inside flexc"
    q, k, v = (torch.randn(1, 2, 100, 64) for _ in range(3))
    window = flexc.masks.sliding_window(32)
    out = flexc.attention(q, k, v, mask_mod=window)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=flexc.create_mask(window, 1, 1, 100, 100, device="cpu")
    )
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)

    kernel = flexc.compile(mask_mod=window, head_dim=64, dtype=torch.bfloat16, target="sm90", backward=False)
    assert kernel.ptx, "machine code was made"
    print(f"flexc {flexc.__version__} from {Path(flexc.__file__).parent}: attention and compile work")


if __name__ == "__main__":
    main()
