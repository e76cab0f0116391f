"""Spilled registers: which of them speak against a kernel's tiles."""

from __future__ import annotations

from enum import Enum

from flexc.artifact import Resources
from flexc.codegen.refusals import Spilled
from flexc.toolchain import disassemble, spills_in_matrix_loops

_FEW_IN_LOOPS = 8
"""Accesses in all loops of a kernel that cost less than smaller tiles would."""
_FEW_BYTES = 384
"""A thread; so many lie outside the loops."""
_SCALARS = 48
"""Accesses in all loops of a kernel to addresses and the like."""


class Spares(Enum):
    """Which spilled registers count for nothing when tiles are chosen."""

    NONE = "none"
    OUTSIDE_LOOPS = "outside loops"
    """Those around the loops with matrix products: what is needed rarely."""
    FEW = "few"
    """Up to 384 bytes a thread, which are such too; and outside loops."""
    ALL = "all"
    """Any: the tiles were timed as they are."""
    SCALARS = "scalars"
    """Up to 48 accesses in loops: addresses and the like, not tiles."""


def spills_that_count(spares: Spares, resources: Resources, cubin: bytes) -> tuple[int, Spilled]:
    """How much a kernel spills where it counts, 0 for nothing, and that as text for `explain`.

    In bytes a thread, or in accesses of its loops with matrix products where only these count.
    """
    text = Spilled(f"{resources.spills} bytes of spilled registers")
    if spares is Spares.ALL:
        return 0, text
    if spares is Spares.NONE or not resources.spills:
        return resources.spills, text
    if spares is Spares.FEW and resources.spills <= _FEW_BYTES:
        return 0, text
    sass = disassemble(cubin)
    if "HGMMA" not in sass:
        return resources.spills, text
    count = spills_in_matrix_loops(sass)
    if count <= (_SCALARS if spares is Spares.SCALARS else _FEW_IN_LOOPS):
        return 0, text
    return count, Spilled(f"{count} accesses to spilled registers in its loops")
