"""Gradients on the CPU need memory that grows with the lengths, not with their product."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch, flexc
torch.set_num_threads(2)
length = 32_768
q, k, v = (torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3))
table = torch.zeros(2, 257, requires_grad=True)

def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 256)

def biased(score, b, h, q_idx, kv_idx):
    return score + {bias}

out, lse = flexc.attention(q, k, v, mask_mod=window, score_mod=biased, return_lse=True)
(out.sum() + lse.sum()).backward()
assert all(x.grad.isfinite().all() and (x.grad != 0).any() for x in (q, k, v)), "gradients"
assert table.grad is None or (table.grad[:, :256] != 0).all()
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
peak = int(line.split()[1]) * 1024
assert peak < 1 << 30, f"{{peak}} bytes"
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
@pytest.mark.parametrize("bias", ["0.001 * (kv_idx - q_idx)", "table[h, q_idx - kv_idx]"])
def test_peak_memory_at_32768(bias: str) -> None:
    """The whole process stays under 1 GB; the scores alone would be 8 GB."""
    command = [sys.executable, "-c", SCRIPT.format(bias=bias)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
