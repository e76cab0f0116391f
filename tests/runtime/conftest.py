"""What was traced anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexc import traces
from flexc.frontend.trace import trace
from flexc.ir.graph import ModKind


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were traced, not relocated."""
    functions: list[Any] = []

    def noted(function: Callable[..., Any], kind: ModKind) -> Any:
        functions.append(function)
        return trace(function, kind)

    monkeypatch.setattr(traces, "trace", noted)
    traces._templates.clear()
    return functions
