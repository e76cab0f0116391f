"""The GPU generations that flexc compiles for, and what each offers to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flexc.errors import UnsupportedTarget


class MatrixUnit(Enum):
    """The matrix instruction of a generation: it decides where operands and accumulators live."""

    MMA_SYNC = "mma.sync"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05.mma"


@dataclass(frozen=True, slots=True)
class Target:
    """One generation. `capability` is major * 10 + minor; `shared_memory`, bytes, is for one block.

    `matrix_flops` is what the matrix unit of one multiprocessor does in a clock: floating-point operations of
    a dense bf16 or fp16 product with fp32 sums, as NVIDIA's white papers of the server GPUs give it.
    """

    name: str
    capability: int
    shared_memory: int
    matrix_unit: MatrixUnit
    matrix_flops: int
    tensor_memory: int = 0
    """Columns of tensor memory that one block may use."""
    registers_per_thread: int = 255
    registers_per_block: int = 65536

    @property
    def has_early_starts(self) -> bool:
        """Whether a kernel can begin while the one before still runs, and wait for it when it needs to."""
        return self.capability >= 90

    def register_limit(self, warps: int) -> int:
        """Registers that a thread may have in a block of so many warps."""
        return min(self.registers_per_thread, self.registers_per_block // (32 * warps))


_KIB = 1024
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm80", 80, 163 * _KIB, MatrixUnit.MMA_SYNC, 2048),
        Target("sm86", 86, 99 * _KIB, MatrixUnit.MMA_SYNC, 1024),
        Target("sm89", 89, 99 * _KIB, MatrixUnit.MMA_SYNC, 1024),
        Target("sm90", 90, 227 * _KIB, MatrixUnit.WGMMA, 4096),
        Target("sm100", 100, 227 * _KIB, MatrixUnit.TCGEN05, 8192, 512),
        Target("sm103", 103, 227 * _KIB, MatrixUnit.TCGEN05, 8192, 512),
        Target("sm120", 120, 99 * _KIB, MatrixUnit.MMA_SYNC, 1024),
    )
}


def target_named(name: str) -> Target:
    """The target called `name`, e.g. "sm90".

    Raises:
        UnsupportedTarget: there is none of that name.
    """
    found = TARGETS.get(name)
    if found is None:
        raise UnsupportedTarget(f"there is no target {name!r}", hint=f"one of {', '.join(TARGETS)}")
    return found


def target_for_capability(major: int, minor: int) -> Target:
    """The target whose kernels run best on a GPU of that compute capability.

    A minor version without a target of its own takes the newest older one of its major version: machine code
    runs on later minor versions.
    """
    fitting = [t for t in TARGETS.values() if t.capability // 10 == major and t.capability % 10 <= minor]
    if not fitting:
        raise UnsupportedTarget(
            f"no kernels for compute capability {major}.{minor}", hint=f"flexc serves {', '.join(TARGETS)}"
        )
    return max(fitting, key=lambda t: t.capability)
