"""What Gluon calls differently from one Triton version to the next, as lines of a generated file.

A generated file runs with every supported version, so it asks for the newer name first.
"""

from __future__ import annotations

RENAMED: tuple[str, ...] = (
    # Triton 3.8 added the short names, 3.9 removed the long ones.
    'tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared',
    'tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global',
)
NAMES = frozenset(line.split(" = ")[0] for line in RENAMED)
