"""What a kernel's machine code holds, read from its disassembly: matrix instructions, bulk copies, spills.

Counts are of instructions in the code, not of how often they run.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_BUDGET = re.compile(r"USETMAXREG[^;]*?\b0x([0-9a-f]+)")
_MATRIX = re.compile(r"(?:[A-Z]GMMA|[A-Z]MMA|UTC[A-Z]*MMA)$")
"""HMMA, IMMA, ...: mma.sync; HGMMA, QGMMA: wgmma; UTCHMMA, ...: tcgen05.mma."""
_BULK = re.compile(r"UTMA(?:LDG|STG|REDG)$|UBLK(?:CP|RED)$|LDGSTS$")
"""TMA's loads, stores and reductions, of tensors and of plain ranges; LDGSTS is cp.async."""
_WAIT = re.compile(r"WARPGROUP\.DEPBAR")
_WORD = 4


@dataclass(frozen=True, slots=True)
class Instructions:
    """What the code of one kernel holds.

    `matrix` and `copies` map the names of instructions to their counts. `stored` and `loaded` are bytes that
    instructions on a thread's local memory move, each counted once: what ptxas calls spill stores and loads,
    when the kernel has no arrays of its own there. `waits` are those for wgmma. `budgets` are the registers a
    thread that setmaxnreg asks for, most first; none where it is not used.
    """

    matrix: dict[str, int]
    copies: dict[str, int]
    stored: int
    loaded: int
    waits: int
    budgets: tuple[int, ...]


def read(sass: str) -> Instructions:
    """The instructions of a disassembly by `flexc.toolchain.disassemble`."""
    full = Counter(match[1] for match in _INSTRUCTION.finditer(sass))
    names: Counter[str] = Counter()
    for text, count in full.items():
        names[text.partition(".")[0]] += count
    return Instructions(
        matrix={name: count for name, count in sorted(names.items()) if _MATRIX.match(name)},
        copies={name: count for name, count in sorted(names.items()) if _BULK.match(name)},
        stored=_bytes(full, "STL"),
        loaded=_bytes(full, "LDL"),
        waits=len(_WAIT.findall(sass)),
        budgets=tuple(sorted({int(n, 16) for n in _BUDGET.findall(sass)}, reverse=True)),
    )


def _bytes(full: Counter[str], name: str) -> int:
    return sum(
        count * _width(text) for text, count in full.items() if text == name or text.startswith(f"{name}.")
    )


def _width(text: str) -> int:
    """Bytes that one access moves, of a name like `LDL.64` or `STL.U8`."""
    bits = re.search(r"\.[US]?(8|16|64|128)(?:\.|$)", text)
    return int(bits[1]) // 8 if bits else _WORD
