"""What a kernel's choice and launch, and a benchmark, need to know of a GPU; asked of the driver once."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexc import driver
from flexc.codegen.target import Target, target_for_capability


@lru_cache(maxsize=16)
def target_of(index: int) -> Target:
    """The target of the GPU with that index."""
    return target_for_capability(*torch.cuda.get_device_capability(index))


@lru_cache(maxsize=16)
def processors(index: int) -> int:
    """The number of its multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@lru_cache(maxsize=16)
def highest_clock(index: int) -> int:
    """Cycles a second of its multiprocessors, at most. Under load the power limit may allow fewer."""
    return 1000 * driver.attribute(driver.CLOCK_IN_KHZ, index)


def matrix_rate(index: int) -> float:
    """Floating-point operations a second of its matrix units in bf16 or fp16, dense, at the highest clock."""
    return float(target_of(index).matrix_flops * processors(index) * highest_clock(index))
