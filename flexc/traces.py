"""The trace of a function: made, or that of an earlier function of the same code with other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexc.frontend.relocate import outline
from flexc.frontend.trace import Template, Trace, trace
from flexc.ir.graph import ModKind
from flexc.lru import LRU

_templates: LRU[tuple[object, ...], Template] = LRU(256)


def trace_of(function: Callable[..., Any], kind: ModKind) -> Trace:
    """The trace of a function that has none yet. Raises as `trace` does."""
    # A mode, of a default device for one, decides what a mod makes of constants.
    found = None if torch._C._len_torch_function_stack() else outline(function)
    if found is None:
        return trace(function, kind)
    key = (kind, torch.get_default_dtype(), *found.key)
    template = _templates.get(key)
    made = None if template is None else template.relocated(found)
    if made is None:
        made = trace(function, kind)
        template = Template.of(made, found)
        if template is not None:
            _templates.put(key, template)
    return made
