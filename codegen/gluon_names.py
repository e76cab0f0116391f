"""What Gluon calls differently from one Triton version to the next, as lines of a generated file.

A generated file runs with every supported version, so it asks for the newer name first.
"""

from __future__ import annotations

RENAMED: tuple[str, ...] = (
    # Triton 3.8 added the short names, 3.9 removed the long ones.
    'tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared',
    'tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global',
)
BARRIER = 'thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier'
"""Where the threads of a warp, or of a warpgroup, wait for each other."""
ADDING: tuple[str, ...] = (
    "from triton.experimental.gluon.language._core import builtin",
    "",
    "",
    "@builtin",
    "def add_by_tma(descriptor, place, tile, _semantic=None):",
    '    """`tma.async_atomic_add` of Triton 3.9: an older one has the operation, and no function for it."""',
    "    from triton._C.libtriton import ir",
    "",
    "    place = _semantic._convert_to_ir_values(place, require_i64=False)",
    "    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD",
    "    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, tile.handle)",
    "",
    "",
    'tma_add = getattr(tma, "async_atomic_add", None) or add_by_tma',
    BARRIER,
)
"""Further ones, for kernels that add to memory by TMA."""
NAMES = frozenset(line.split(" = ")[0] for line in RENAMED) | {
    "tma_add", "add_by_tma", "builtin", "thread_barrier",
}  # fmt: skip
