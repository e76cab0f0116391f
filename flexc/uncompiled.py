"""What torch.compile calls in place of tracing flexc. Imported there only: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flexc import api, block_mask

Function = TypeVar("Function", bound=Callable[..., Any])


def _between_graphs(function: Function) -> Function:
    reason = "flexc is no operator of torch.compile in this version; it runs between the graphs"
    disabled: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


attention = _between_graphs(api.attention)
create_block_mask = _between_graphs(block_mask.create_block_mask)
