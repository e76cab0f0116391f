"""The only user of Triton: from a generated file to machine code, on a machine with or without a GPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flexc.errors import BackendUnavailable, InternalError

if TYPE_CHECKING:
    from flexc.codegen.arguments import Argument
    from flexc.codegen.module import GeneratedKernel


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of a generated file, and how to compile it. `capability` is major * 10 + minor."""

    name: str
    arguments: tuple[Argument, ...]
    capability: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread at launch; None where the compiler decides."""


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What Triton made of a generated file.

    `shared` is bytes of dynamic shared memory a block, `tensor_memory` columns of Blackwell's tensor memory.
    """

    cubin: bytes
    ptx: str
    ttgir: str
    name: str
    shared: int
    tensor_memory: int
    num_warps: int
    triton_version: str


def triton_version() -> str:
    """The version of the installed Triton."""
    from importlib.metadata import version

    return version("triton")


def import_file(path: Path) -> ModuleType:
    """The generated file at `path` as a module. It is not entered in `sys.modules` for good."""
    name = f"flexc_generated_{path.parent.name}_{path.stem}".replace("-", "_")
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise InternalError(f"import: {path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # Triton looks a kernel's module up while it reads it
    try:
        found.loader.exec_module(module)
    finally:
        sys.modules.pop(name, None)
    return module


def compile_file(path: Path, kernel: GeneratedKernel) -> MachineCode:
    """Compile the generated file at `path` for the target of its plan; see `compile_entry`."""
    plan = kernel.plan
    return compile_entry(
        path,
        Entry(
            kernel.entry,
            kernel.arguments,
            plan.target.capability,
            plan.tiles.num_warps,
            plan.tiles.num_stages,
            plan.max_registers,
        ),
    )


def compile_entry(path: Path, entry: Entry) -> MachineCode:
    """Compile one function of the generated file at `path`.

    Raises:
        InternalError: Triton refused the generated code; the message names the file and line.
        BackendUnavailable: Triton was told to interpret.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if triton.knobs.runtime.interpret:
        raise BackendUnavailable(
            "TRITON_INTERPRET is set, so Triton interprets and compiles nothing",
            hint="unset it to compile; flexc.attention(..., backend='triton') runs interpreted",
        )
    function = getattr(import_file(path), entry.name)
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function,
        signature={a.name: a.type for a in entry.arguments},
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i, a in enumerate(entry.arguments) if a.divisible},
    )
    target = GPUTarget("cuda", entry.capability, 32)
    # Fusing multiply and add is what the hardware is built for; Triton 3.10 would turn it off by default.
    options: dict[str, int | bool] = {
        "num_warps": entry.num_warps,
        "num_stages": entry.num_stages,
        "enable_fp_fusion": True,
    }
    if entry.max_registers is not None:
        options["maxnreg"] = entry.max_registers
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        raise InternalError(f"compile: Triton {triton_version()} refused {path}\n{error}") from error
    return _machine_code(compiled)


def _machine_code(compiled: Any) -> MachineCode:
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise InternalError("compile: the kernel wants scratch memory, which the launcher does not give")
    return MachineCode(
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        ttgir=compiled.asm["ttgir"],
        name=metadata.name,
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
        num_warps=metadata.num_warps,
        triton_version=triton_version(),
    )


def parameter_count(ptx: str, name: str) -> int:
    """How many parameters the entry point takes: the kernel's own, and pointers that Triton adds."""
    found = re.search(rf"\.entry {re.escape(name)}\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise InternalError(f"compile: the PTX has no entry {name}")
    return found.group(1).count(".param")
