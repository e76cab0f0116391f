"""What compute-sanitizer says of small_runs.py, less what racecheck says of any kernel with roles.

Kernels are changed for racecheck. It (2025.3) credits an arrival at an mbarrier to the thread that executes
it alone, and Triton has one thread arrive for all that it just met at a barrier. Here every thread arrives by
itself, where they met: see tests/ptx_arrivals.py.

One kind of race is left out. Triton's `warp_specialize` writes to shared memory which function a warp is to
run, between barriers of all warps, and the warps read it. racecheck reports some of that, differently often
from run to run, and does so for ten_lines.py, a kernel that does little else. These accesses have the lines
in which a kernel begins and in which it calls `warp_specialize`, and no access of its own has one of them;
small_runs.py says which lines these are.

What it sees is what threads load and store. Of the mistake `--without-wait 1` of a backward for short ranges,
the wait for queries, it reports the numbers told, but not what TMA copies and threads load.
tests/gluon_in_numpy.py finds out who reads what is not there yet, or is not there any more, of copies and of
matrix products too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Place = tuple[str, int]
"""A function and a line."""
_ACCESS = re.compile(r"=========\s+(.*?)(Read|Write) access at (\w+)\+0x[0-9a-f]+ in \S+?:(\d+)")
_HANDS_OVER = re.compile(r"    hands over: (\w+)((?: \d+)*)")
_SUMMARY = re.compile(r"========= (RACECHECK|ERROR) SUMMARY: (\d+) (?:hazards?|errors?)\b")
_OTHER = re.compile(r"========= .*\b(?:Error|Warning)\b(?!: Race reported)")


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong according to a report: with a kernel, and with the run."""

    races: list[str]
    faults: list[str]


def remaining(report: Iterable[str]) -> Findings:
    """The races that are none of Triton's handing over, and what else is wrong."""
    faults: list[str] = []
    first: tuple[str, Place] | None = None
    races: list[tuple[str, frozenset[Place]]] = []
    shown = 0
    summaries: dict[str, int] = {}
    ran = False
    for line in report:
        if access := _ACCESS.match(line):
            here = access[3], int(access[4])
            text = f"{access[2]} at {access[3]}:{access[4]}"
            if "Race reported between" in access[1]:
                shown, first = shown + 1, (text, here)
            elif first is not None:
                races.append((f"{first[0]}, {text}", frozenset({first[1], here})))
        elif over := _HANDS_OVER.match(line):
            own = {(over[1], int(n)) for n in over[2].split()}
            races = [race for race in races if not race[1] <= own]
        elif summary := _SUMMARY.match(line):
            summaries[summary[1]] = int(summary[2])
        elif _OTHER.match(line):
            faults.append(line.strip())
        ran = ran or line.strip() == "all ran"
    said = summaries.get("RACECHECK", 0)
    if shown != said:
        faults.append(f"{shown} races are shown, and there are {said}: pass --print-limit 0")
    if summaries.get("ERROR"):
        faults.append(f"{summaries['ERROR']} errors")
    if not summaries:
        faults.append("no tool looked at it")
    if not ran:
        faults.append("it did not end")
    return Findings([text for text, _ in races], faults)
