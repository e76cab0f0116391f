"""Which cells a benchmark has: every case at every size, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flexc.bench.cases import FIXED_SIZES, Case, Problem, make_case
from flexc.modfile import load_one


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell, as plain data that other processes understand.

    `case` is the name of a standard case; with `own` it is the user's mods, written `FILE.py:NAME`.
    """

    case: str
    problem: Problem
    own: bool = False
    backward: bool = False

    def make(self) -> Case:
        """The case with its tensors on the problem's device.

        Raises:
            UnknownOption: there is no such case.
            ModFileError: the user's mods can't be loaded.
        """
        if not self.own:
            return make_case(self.case, self.problem)
        mods = load_one(self.case)
        return Case(mods.name, mask=mods.mask, score=mods.score, per_batch=True, per_head=True)


def problems(
    *, lengths: Sequence[int], head_dims: Sequence[int], tokens: int, hidden: int, dtype: torch.dtype
) -> Iterator[Problem]:
    """Every head dimension and length, with `tokens` tokens in all and heads that make up `hidden`."""
    for head_dim in head_dims:
        for length in lengths:
            yield Problem(
                batch=max(1, tokens // length),
                heads=max(1, hidden // head_dim),
                length=length,
                head_dim=head_dim,
                dtype=dtype,
                device=_device(),
            )


def plans(
    cases: Sequence[str], sizes: Sequence[Problem], *, own: bool, directions: Sequence[bool]
) -> list[Plan]:
    """Every case at every size, then the cases that have a size of their own.

    `directions` says whether the forward (False), the backward (True), or both of a cell are timed.
    """
    fixed = [] if own else [case for case in cases if case in FIXED_SIZES]
    cells = [(case, size) for size in sizes for case in cases if case not in fixed]
    for case in fixed:
        batch, heads, length, head_dim = FIXED_SIZES[case]
        cells.append((case, Problem(batch, heads, length, head_dim, sizes[0].dtype, sizes[0].device)))
    return [Plan(case, size, own, backward) for case, size in cells for backward in directions]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
