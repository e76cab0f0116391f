"""What torch.compile calls in place of tracing flexc. Imported there only: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flexc import block_mask

Function = TypeVar("Function", bound=Callable[..., Any])


def _between_graphs(function: Function) -> Function:
    reason = "a block mask is made between the graphs; make it outside, or pass only mask_mod"
    disabled: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


create_block_mask = _between_graphs(block_mask.create_block_mask)
