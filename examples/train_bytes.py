"""A small byte-level transformer learns Python from the standard library's own sources, on a CPU.

Files are packed one after another; attention stays inside a file, sees a window of the bytes before it, and
has a learned bias by distance. `--check` trains a twin with dense attention, and compares the losses.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import flexc

DIM, HEADS, LAYERS, WINDOW, LENGTH = 64, 4, 2, 64, 512

# A few units in the last place of a loss in fp32.
ROUNDING = 1e-6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, 3 * DIM)
        self.merge = nn.Linear(DIM, DIM)
        self.bias = nn.Parameter(torch.zeros(HEADS, WINDOW))

    def forward(self, x: torch.Tensor, files: torch.Tensor, backend: str) -> torch.Tensor:
        def same_file(b, h, q_idx, kv_idx):
            return files[b, q_idx] == files[b, kv_idx]

        def by_distance(score, b, h, q_idx, kv_idx):
            return score + self.bias[h, q_idx - kv_idx]

        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = flexc.masks.sliding_window(WINDOW) & same_file
        out = flexc.attention(q, k, v, mask_mod=mask, score_mod=by_distance, backend=backend)
        merged: torch.Tensor = self.merge(out.transpose(1, 2).flatten(2))
        return merged


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attend = Attention()
        self.feed: nn.Module = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: torch.Tensor, files: torch.Tensor, backend: str) -> torch.Tensor:
        x = x + self.attend(self.norm(x), files, backend)
        y: torch.Tensor = x + self.feed(x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 256))

    def forward(self, data: torch.Tensor, files: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """The mean loss of predicting each byte from those before it in its file, in nats."""
        x = self.embed(data[:, :-1])
        for layer in self.layers:
            x = layer(x, files[:, :-1], backend)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), data[:, 1:].flatten(), reduction="none")
        known = (files[:, 1:] == files[:, :-1]).flatten()  # a file's first byte is anyone's guess
        return (loss * known).sum() / known.sum()


def packed_files(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the first files of the standard library, and the number of the file of each."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    texts = [torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8) for path in paths]
    files = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor([len(t) for t in texts]))
    return torch.cat(texts).long(), files.int()


def train(steps: int = 150, batch: int = 4, check: bool = False) -> list[float]:
    """The losses, step by step. With `check`, each is compared to that of a twin with dense attention."""
    torch.manual_seed(0)
    data, files = packed_files()
    model = Model()
    models = {"auto": model, "reference": copy.deepcopy(model)} if check else {"auto": model}
    optimizer = torch.optim.AdamW([p for m in models.values() for p in m.parameters()], lr=3e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (batch,))
        rows = starts[:, None] + torch.arange(LENGTH + 1)
        loss, *dense = (m(data[rows], files[rows], backend) for backend, m in models.items())
        optimizer.zero_grad()
        sum(dense, loss).backward()
        optimizer.step()
        losses.append(loss.item())
        for other in dense:
            torch.testing.assert_close(loss, other, rtol=ROUNDING, atol=0.0)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4}  {_recent(losses):.3f} nats a byte", flush=True)
    return losses


def _recent(losses: list[float]) -> float:
    """The mean of the last ten: batches are of few files, and some files are harder than others."""
    return statistics.fmean(losses[-10:])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--check", action="store_true", help="compare with the dense computation")
    options = parser.parse_args(arguments)
    before = time.perf_counter()
    losses = train(options.steps, check=options.check)
    took = time.perf_counter() - before
    print(f"{losses[0]:.3f} to {_recent(losses):.3f} nats a byte in {options.steps} steps, {took:.0f} s")


if __name__ == "__main__":
    main()
