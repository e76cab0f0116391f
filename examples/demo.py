"""The main job: three real masks, from Python function to picture, machine code for three GPUs, and numbers.

Run it with `make demo`, or `python examples/demo.py [FOLDER]`. Pictures and kernels go to `demo-output/`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from pathlib import Path

import torch

import flexc
from flexc.precompile import Made, plan_jobs, precompile, write_manifest

TARGETS = ("sm80", "sm90", "sm100")
HEADS, HEAD_DIM, TOKENS = 4, 64, 4096
WINDOW = 512
CORNER = 1024  # tokens of the pictures that show every pair
GRID, RADIUS = 64, 6


def standard_library_documents(tokens: int) -> torch.Tensor:
    """The document of each token, when files of Python's standard library are packed, one token a line."""
    folder = Path(sysconfig.get_path("stdlib"))
    lengths = [len(path.read_bytes().splitlines()) for path in sorted(folder.glob("*.py"))]
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[:tokens].int()


DOCUMENT = standard_library_documents(TOKENS)
if torch.cuda.is_available():
    DOCUMENT = DOCUMENT.cuda()


@flexc.mask_mod
def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


@flexc.mask_mod
def packed_documents(b, h, q_idx, kv_idx):
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


@flexc.mask_mod
def neighbourhood(b, h, q_idx, kv_idx):
    rows_apart = q_idx // GRID - kv_idx // GRID
    columns_apart = q_idx % GRID - kv_idx % GRID
    return (abs(rows_apart) <= RADIUS) & (abs(columns_apart) <= RADIUS)


MASKS = {
    "sliding_window": sliding_window,
    "packed_documents": packed_documents,
    "neighbourhood": neighbourhood,
}


def explain_and_draw(folder: Path) -> None:
    """What was traced and decided, and two pictures of each mask."""
    for name, mask in MASKS.items():
        print(mask.explain(TOKENS, TOKENS))
        pictures = {"": mask.plot(CORNER, CORNER), "-tiles": mask.plot(TOKENS, TOKENS, block=True)}
        for ending, figure in pictures.items():
            path = folder / f"{name}{ending}.png"
            figure.savefig(path)
            print(f"  {'picture':<13} {path}")
        print()


def compile_all(folder: Path) -> None:
    """Every mask for every target, in parallel, for GPUs that need not be here."""
    began = time.perf_counter()
    jobs = plan_jobs([__file__], TARGETS, [HEAD_DIM], ["bf16"])
    made: list[Made] = list(precompile(jobs, folder / "kernels", workers=os.cpu_count() or 1))
    print(f"{'kernel':<18} {'target':<7} {'registers':>9} {'spills':>7} {'shared memory':>14}")
    for one in sorted(made, key=lambda one: (one.job.name, TARGETS.index(one.job.target))):
        if one.error is not None:
            raise SystemExit(f"{one.job.name} for {one.job.target}: {one.error}")
        for facts in one.resources.values():
            numbers = f"{facts['registers']:>9} {facts['spills']:>7} {facts['shared_memory']:>14,}"
            print(f"{one.job.name:<18} {one.job.target:<7} {numbers}")
    manifest = write_manifest(made, folder / "kernels")
    print(f"{len(made)} kernels in {time.perf_counter() - began:.0f} s, listed in {manifest}\n")


def compute() -> None:
    """Attention on this machine, its error against fp64, and that of PyTorch's dense attention."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    print(f"attention on {device}, {dtype}: {HEADS} heads, {TOKENS} tokens, head dimension {HEAD_DIM};")
    print("the largest error is against fp64")
    for name, mask in MASKS.items():
        flexc.attention(q, k, v, mask_mod=mask)  # the first call compiles, and finds the tiles
        began = time.perf_counter()
        out = flexc.attention(q, k, v, mask_mod=mask).cpu()
        seconds = time.perf_counter() - began

        exact = flexc.attention(q.double(), k.double(), v.double(), mask_mod=mask, backend="reference").cpu()
        dense = flexc.create_mask(mask, 1, 1, TOKENS, TOKENS, device=device)
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense).cpu()
        own, theirs = (float((x.double() - exact).abs().max()) for x in (out, plain))
        print(f"{name:<18} {seconds * 1e3:7.1f} ms   error {own:.1e}   PyTorch's {theirs:.1e}")
        if own > 2 * theirs + 1e-6:
            raise SystemExit(f"{name}: the error is more than twice that of PyTorch")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo-output")
    folder.mkdir(parents=True, exist_ok=True)
    explain_and_draw(folder)
    compile_all(folder)
    compute()


if __name__ == "__main__":
    main()
