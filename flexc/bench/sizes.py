"""What a benchmark times when it is not told: on a CPU much less, so that it ends in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.bench.cases import CASES


@dataclass(frozen=True, slots=True)
class Sizes:
    """`hidden` is heads times head dimension; `rounds` are the timed calls of each peer."""

    cases: tuple[str, ...]
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    hidden: int
    rounds: int


ON_GPU = Sizes(cases=tuple(CASES), lengths=(4096, 16384), head_dims=(64, 128), hidden=2048, rounds=20)
ON_CPU = Sizes(
    cases=tuple(case for case in CASES if "window" not in case),  # one is wider than this length
    lengths=(512,),
    head_dims=(64,),
    hidden=256,
    rounds=5,
)


def usual_sizes(*, on_gpu: bool) -> Sizes:
    """Those of PERFORMANCE.md on a GPU, small ones on a CPU."""
    return ON_GPU if on_gpu else ON_CPU
