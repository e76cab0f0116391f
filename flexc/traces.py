"""The trace of a function: made, or that of an earlier function of the same code with other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexc.frontend.relocate import Outline, outline
from flexc.frontend.trace import Template, Trace, trace
from flexc.ir.graph import ModKind
from flexc.lru import LRU

_templates: LRU[tuple[object, ...], Template] = LRU(256)


def trace_of(function: Callable[..., Any], kind: ModKind) -> Trace:
    """The trace of a function that has none yet. Raises as `trace` does."""
    found = _outline(function)
    if found is None:
        return trace(function, kind)
    made = _relocated(found, kind)
    if made is None:
        made = trace(function, kind)
        template = Template.of(made, found)
        if template is not None:
            _templates.put(_key(found, kind), template)
    return made


def relocated(function: Callable[..., Any], kind: ModKind) -> Trace | None:
    """The same where it need not be made; else None."""
    found = _outline(function)
    return None if found is None else _relocated(found, kind)


def _outline(function: Callable[..., Any]) -> Outline | None:
    # A mode, of a default device for one, decides what a mod makes of constants.
    return None if torch._C._len_torch_function_stack() else outline(function)


def _relocated(found: Outline, kind: ModKind) -> Trace | None:
    template = _templates.get(_key(found, kind))
    return None if template is None else template.relocated(found)


def _key(found: Outline, kind: ModKind) -> tuple[object, ...]:
    return kind.value, torch.get_default_dtype(), found.key
