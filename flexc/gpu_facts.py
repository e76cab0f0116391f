"""What a kernel's choice and launch need to know of a GPU; asked of the driver once."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexc.codegen.target import Target, target_for_capability


@lru_cache(maxsize=16)
def target_of(index: int) -> Target:
    """The target of the GPU with that index."""
    return target_for_capability(*torch.cuda.get_device_capability(index))


@lru_cache(maxsize=16)
def processors(index: int) -> int:
    """The number of its multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
