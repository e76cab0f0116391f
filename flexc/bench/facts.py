"""What the kernels of a call are made of: registers, spills, matrix instructions, shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexc.artifact import Artifact
from flexc.errors import BackendUnavailable
from flexc.launcher import recording
from flexc.sass import Instructions, read
from flexc.toolchain import disassemble


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel. `instructions` is None where the tools that read machine code are missing.

    `registers` a thread, as launched; `spills` bytes of local memory a thread; `shared_memory` bytes a block.
    """

    entry: str
    block_q: int
    block_kv: int
    warps: int
    registers: int
    spills: int
    shared_memory: int
    instructions: Instructions | None


_known: dict[str, KernelFacts] = {}


def facts_of(artifact: Artifact) -> KernelFacts:
    """What a compiled kernel is made of."""
    found = _known.get(artifact.key)
    if found is None:
        try:
            instructions = read(disassemble(artifact.cubin))
        except BackendUnavailable:
            instructions = None
        resources = artifact.resources
        found = _known[artifact.key] = KernelFacts(
            entry=artifact.entry,
            block_q=artifact.block_q,
            block_kv=artifact.block_kv,
            warps=resources.warps,
            registers=resources.registers,
            spills=resources.spills,
            shared_memory=resources.shared_memory,
            instructions=instructions,
        )
    return found


def kernels_of(call: Callable[[], object]) -> tuple[KernelFacts, ...]:
    """The kernels of flexc that `call` launches, in order; none for a call of others, or on the CPU."""
    with recording() as launched:
        call()
    return tuple(map(facts_of, launched))
