"""What torch.compile calls in place of tracing flexc. Imported there only: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flexc import block_mask

Function = TypeVar("Function", bound=Callable[..., Any])


def _between_graphs(function: Function) -> Function:
    reason = "blocks of a mask are found between graphs: make it outside, or only pass it as block_mask="
    disabled: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


create_block_mask = _between_graphs(block_mask.create_block_mask)
