"""The disassembler and the resource report of the CUDA tools that Triton's wheel carries."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from flexc.artifact import Resources
from flexc.errors import BackendUnavailable, InternalError


@lru_cache(maxsize=8)
def _tool(name: str) -> Path:
    found = find_spec("triton")
    for root in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(root) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return path
    raise BackendUnavailable(
        f"{name} is missing", hint="it comes with the triton package: pip install triton"
    )


def _run(tool: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_tool(tool), *arguments, file.name], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise InternalError(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text."""
    return _run("nvdisasm", "-c", cubin=cubin)


def resources_of(cubin: bytes, *, shared: int, warps: int) -> Resources:
    """What a kernel takes, as its machine code says; that does not know the dynamic `shared` memory."""
    text = _run("cuobjdump", "-res-usage", cubin=cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise InternalError(f"cuobjdump said nothing of resources: {text.strip()}")
    registers, stack, static, local = map(int, found.groups())
    return Resources(registers, stack + local, shared + static, warps)


def spills_in_matrix_loops(sass: str) -> int:
    """How many instructions of innermost loops with wgmma read or write spilled registers.

    A loop is what a conditional jump back encloses: a wait that was moved out of line jumps back in any case.
    """
    lines = sass.splitlines()
    labels = {line.strip()[:-1]: at for at, line in enumerate(lines) if re.match(r"\s*\.L_\w+:\s*$", line)}
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"@!?U?P\d+ BRA[^;]*`\((\.L_\w+)\)", line)
        start = labels.get(jump[1], end) if jump else end
        if start < end and any("HGMMA" in inner for inner in lines[start:end]):
            loops.append((start, end))
    innermost = [
        (a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for a, b in innermost for line in lines[a:b])
