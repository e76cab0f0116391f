"""Compile for a GPU that is not here, save the kernel, and load it again; loading compiles nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import flexc


def main() -> None:
    mask = flexc.masks.sliding_window(1024)
    with tempfile.TemporaryDirectory() as folder:
        for target in ("sm80", "sm90", "sm100"):
            kernel = flexc.compile(mask_mod=mask, head_dim=128, dtype=torch.bfloat16, target=target)
            path = Path(folder) / target
            kernel.save(path)
            loaded = flexc.load(path)
            assert loaded.source == kernel.source
            for entry, facts in loaded.resources.items():
                print(f"{target:5} {entry}: {facts}")


if __name__ == "__main__":
    main()
