"""Whether a trace that was not made anew is the one that tracing gives."""

from __future__ import annotations

from flexc.frontend.trace import trace
from flexc.mods import Mod


def check_trace(mod: Mod) -> None:
    """The mod has the graph and the values that tracing gives it, also when asked again."""
    expected = trace(mod.function, mod.kind)
    for _ in range(2):
        found = mod.trace()
        assert found.graph is expected.graph
        assert len(found.values) == len(expected.values)
        for ours, theirs in zip(found.values, expected.values, strict=True):
            assert ours is theirs or ours == theirs
