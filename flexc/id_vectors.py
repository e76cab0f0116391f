"""Where equal ids lie: vectors that closed forms of `doc[q_idx] == doc[kv_idx]` read (`ir/id_runs.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class IdVectors(NamedTuple):
    """For every position, int32 of the shape of the ids: the positions of its id.

    From `run_first` to `run_end` around it without a gap; from `hull_first` to `hull_end` everywhere.
    """

    run_first: torch.Tensor
    run_end: torch.Tensor
    hull_first: torch.Tensor
    hull_end: torch.Tensor


def id_vectors(ids: torch.Tensor, wanted: frozenset[str] = frozenset(IdVectors._fields)) -> IdVectors:
    """The vectors of integer or bool ids (..., n), computed on their device. Nothing waits for it.

    Those that are not `wanted` may hold anything.

    Ends are found by searching in sorted sequences, the ids and the numbers of the runs: prefix maxima, which
    would be the other way, are slow on GPUs.
    """
    shape, n = ids.shape, ids.shape[-1]
    if ids.numel() == 0:
        empty = torch.zeros(shape, dtype=torch.int32, device=ids.device)
        return IdVectors(empty, empty, empty, empty)
    rows = ids.detach().reshape(-1, n).contiguous()
    if rows.dtype is torch.bool:
        rows = rows.view(torch.uint8)
    found: dict[str, torch.Tensor] = {}
    if not wanted.isdisjoint(("run_first", "run_end")):
        starts = torch.zeros(rows.shape, dtype=torch.int32, device=rows.device)
        torch.ne(rows[:, 1:], rows[:, :-1], out=starts[:, 1:])
        run = torch.cumsum(starts, 1, dtype=torch.int32)
        for name in wanted & {"run_first", "run_end"}:
            found[name] = torch.searchsorted(run, run, right=name == "run_end", out_int32=True)
    if not wanted.isdisjoint(("hull_first", "hull_end")):
        ordered, order = torch.sort(rows, dim=1, stable=True)
        if "hull_first" in wanted:
            found["hull_first"] = order.gather(1, torch.searchsorted(ordered, rows)).to(torch.int32)
        if "hull_end" in wanted:
            behind = torch.searchsorted(ordered, rows, right=True)
            found["hull_end"] = order.gather(1, behind.sub_(1)).to(torch.int32).add_(1)
    anything = next(iter(found.values()), torch.empty_like(rows, dtype=torch.int32))
    return IdVectors(*(found.get(name, anything).view(shape) for name in IdVectors._fields))
