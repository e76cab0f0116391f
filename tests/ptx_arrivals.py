"""Arrivals at mbarriers in Triton's PTX, and the same kernel with an arrival of every thread.

Triton has one thread arrive for a warp or a warpgroup, after all its threads met at a barrier: so what they
did before comes before what the others do who wait. racecheck does not see that. It credits an arrival to the
thread that executes it, and reports what other threads did as a race. `of_every_thread` makes a kernel that
it can read, and adds no order to it: threads arrive where they have just met the one that arrived for them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

SHARES = 128
"""Of every arrival: a thread of a warpgroup has one of them, one of a warp that works alone has four."""
_ONE = r"\s*@(%p\d+) "
_AT = r"\.shared(?:::cta)?\.b64\s+(?:_, )?\[([^]]+)\]"
_INIT = re.compile(rf"({_ONE}mbarrier\.init{_AT}, )(\d+);")
_ARRIVE = re.compile(rf"{_ONE}mbarrier\.arrive{_AT}(?:, (\d+))?;")
_EXPECT = re.compile(rf"{_ONE}mbarrier\.arrive\.expect_tx{_AT}, .*;")
_BY_EACH = re.compile(rf"\s*cp\.async\.mbarrier\.arrive\.noinc{_AT};")
_MEETING = re.compile(r"\s*(?:bar\.sync\s+(\d+), (\d+);|bar\.(warp)\.sync\s+-1;)")
_STORE = re.compile(r"\s*(?:@!?%p\d+ )?(?:st\.shared|stmatrix)\b")
_OTHER = re.compile(
    r"\s*(?:@!?%p\d+ )?(?:ld(?!\.param)|st|atom|red|ldmatrix|cp|wgmma|bra|brx|call|setmaxnreg)\b|\$L__BB"
)


class Unmet(ValueError):
    """One thread arrives for others, which did something that it need not know of."""


def meeting(lines: list[str], at: int) -> re.Match[str] | None:
    """The barrier where the threads met for which line `at` arrives: they did nothing but wait since then.

    None if they did something else, or if there is none before the next label.

    Raises:
        Unmet: they wrote to shared memory since then.
    """
    idle = True
    for line in reversed(lines[:at]):
        if found := _MEETING.match(line):
            return found if idle else None
        if _STORE.match(line):
            raise Unmet(f"line {at + 1}: {lines[at].strip()} follows {line.strip()}")
        if line.startswith("$L__BB"):
            return None
        idle = idle and not _OTHER.match(line)
    return None


def of_every_thread(ptx: str) -> str:
    """The same kernel, in which every thread arrives that had another one arrive for it.

    A kernel of one warpgroup stays as it is: Triton has all its threads meet where they share memory, and an
    mbarrier tells them of copies alone.

    Raises:
        Unmet: one thread arrives for others that it did not just meet.
    """
    lines = ptx.splitlines()
    if ".reqntid 128" in map(str.strip, lines) and not any(map(_ARRIVE.match, lines)):
        return ptx
    return "\n".join(_rewritten(lines, at) for at in range(len(lines))) + "\n"


def _rewritten(lines: list[str], at: int) -> str:
    line = lines[at]
    if found := _INIT.match(line):
        return f"{found[1]}{int(found[4]) * SHARES};"
    if found := _BY_EACH.match(line):
        return _arrival(found[1], SHARES)
    if found := _ARRIVE.match(line):
        return _arrivals(lines, at, *found.groups())
    if found := _EXPECT.match(line):
        return _expectation(lines, at, *found.groups())
    if "mbarrier.arrive" in line or "mbarrier.init" in line:
        raise ValueError(f"line {at + 1}: an unknown form: {line.strip()}")
    return line


def _arrival(address: str, shares: int) -> str:
    return f"mbarrier.arrive.shared::cta.b64 _, [{address}], {shares};"


def _arrivals(lines: list[str], at: int, one: str, address: str, count: str | None) -> str:
    """Whether the one arrives depends on more than its number, so the others ask it."""
    met = meeting(lines, at)
    if met is None:
        raise Unmet(f"line {at + 1}: {lines[at].strip()} follows no barrier")
    name, threads, warp = met.groups()
    ask = f"vote.sync.any.pred all, {one}, -1;" if warp else f"bar.red.or.pred all, {name}, {threads}, {one};"
    shares = int(count or 1) * SHARES // (32 if warp else int(threads))
    return f"{{ .reg .pred all;\n{ask}\n@all {_arrival(address, shares)}\n}}"


def _expectation(lines: list[str], at: int, one: str, address: str) -> str:
    """One lane of a warp expects bytes, and has one share for that.

    It has the rest of its shares as the others; or all of them, where the lanes did something since they met:
    then it speaks of the bytes alone.
    """
    met = meeting(lines, at)
    if met is None:
        return f"{lines[at]}\n@{one} {_arrival(address, SHARES - 1)}"
    if met[3] is None:
        raise ValueError(f"line {at + 1}: a warpgroup expects bytes")
    each = SHARES // 32
    return (
        f"{{ .reg .pred all, others;\nvote.sync.any.pred all, {one}, -1;\n"
        f"xor.pred others, {one}, all;\n{lines[at]}\n"
        f"@{one} {_arrival(address, each - 1)}\n@others {_arrival(address, each)}\n}}"
    )


_WAIT = "@!complete bra.uni waitLoop;"


def without_wait(ptx: str, nth: int) -> str:
    """The same kernel, in which one wait at an mbarrier asks once and goes on: a mistake, to be found."""
    parts = ptx.split(_WAIT)
    assert nth < len(parts) - 1, f"there are {len(parts) - 1} waits"
    return _WAIT.join(parts[: nth + 1]) + _WAIT.join(parts[nth + 1 :])


def assemble(ptx: str) -> bytes:
    """Its machine code, by the assembler that Triton calls, for the GPU that the PTX names."""
    from triton import knobs

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-lineinfo", f"--gpu-name={target[1]}", source, "-o", code]
        subprocess.run(command, check=True, capture_output=True)
        return code.read_bytes()
