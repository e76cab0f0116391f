"""Look at what was understood of a mask, what was decided, and the generated kernel."""

from __future__ import annotations

import torch

import flexc


@flexc.mask_mod
def dilated(b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance < 512) & (distance % 4 == 0)


def main() -> None:
    print(dilated.explain(4096, 4096), end="\n\n")

    kernel = flexc.compile(mask_mod=dilated, head_dim=64, dtype=torch.float16, target="sm90")
    print(kernel.explain(), end="\n\n")
    print("the kernel starts with:")
    print("\n".join(kernel.source.splitlines()[:40]), end="\n\n")
    for entry, ptx in kernel.ptx.items():
        print(f"{entry}: {len(ptx.splitlines())} lines of PTX, {ptx.count('wgmma.mma_async')} wgmma")


if __name__ == "__main__":
    main()
