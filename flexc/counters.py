"""Counters in GPU memory by which the programs of one launch share out their tiles.

A kernel leaves its counters at zero. Launches on one stream follow each other, so they share a pair; a
captured graph may be replayed beside anything, so each of its launches has its own, zeroed within the graph.
"""

from __future__ import annotations

import torch

_pairs: dict[tuple[int, int], torch.Tensor] = {}
_captured: list[torch.Tensor] = []
"""Held for good: a graph knows only their addresses."""


def address_of_pair(device: int, stream: int) -> int:
    """The address of two int32 zeros for one launch on `stream` of `device`."""
    if torch._C._cuda_isCurrentStreamCapturing():
        _captured.append(torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}"))
        return _captured[-1].data_ptr()
    pair = _pairs.get((device, stream))
    if pair is None:
        pair = _pairs[device, stream] = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
    return pair.data_ptr()
