"""What the machine code of a Hopper kernel must show: the promises of its design, read from its SASS."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.artifact import Resources
from flexc.codegen.target import TARGETS
from flexc.compiler import triton_version
from flexc.sass import read
from flexc.toolchain import spills_in_matrix_loops
from tests.ptx_arrivals import of_every_thread

_THREADS = 128
"""Of a warpgroup."""
# Registers were dealt out for Triton 3.6: the ptxas of a newer one leaves a few scalars of a loop in memory.
_NEWER = 0 if triton_version().startswith("3.6.") else 16


@dataclass(frozen=True, slots=True)
class Promise:
    """What a plan promises of one kernel: `consumers` warpgroups that compute beside one that loads.

    `registers` are those of a thread in each kind, `stores` the bulk copy by which results leave, if any, and
    `spills` how many accesses to spilled registers its loops may hold.
    """

    consumers: int
    registers: tuple[int, int]
    stores: str | None = "UTMASTG"
    spills: int = 0
    products: int = 16


def check(sass: str, ptx: str, resources: Resources, promise: Promise) -> None:
    """Fails where the code of a kernel is not what was promised."""
    of_every_thread(ptx)  # raises where one thread arrives for others that it did not just meet
    found = read(sass)
    products = found.matrix.get("HGMMA", 0)
    assert products >= promise.products, found
    # ptxas serialises products whose registers it has to touch in between: a wait after every one.
    assert 4 * found.waits <= products, f"{found.waits} waits for {products} products"
    assert found.copies.get("UTMALDG"), found
    assert promise.stores is None or found.copies.get(promise.stores), found
    assert "LDGSTS" not in found.copies, "a load that is no bulk copy"
    spilled = spills_in_matrix_loops(sass)
    assert spilled <= promise.spills + _NEWER, f"{spilled} accesses to spilled registers in loops"
    target = TARGETS["sm90"]
    # The system takes 1,024 bytes that no kernel asked for.
    assert resources.shared_memory - 1024 <= target.shared_memory
    assert resources.warps == 4 * (promise.consumers + 1)
    computes, loads = promise.registers
    assert set(promise.registers) <= set(found.budgets), found
    assert _THREADS * (promise.consumers * computes + loads) <= target.registers_per_block
