"""compute-sanitizer over small runs of every kind of Hopper kernel, and over mistakes that it has to find.

    PYTHONPATH=. python tests/gpu/sanitize.py                                 # everything: minutes
    PYTHONPATH=. python tests/gpu/sanitize.py --mods causal --head-dims 64    # a part, as of small_runs.py

races.py says what of a kernel racecheck can see, and what is left out of its report. That is not taken on
trust: ten_lines.py is a right kernel that shows both, and a kernel that lost a wait has to be reported.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.races import remaining

RACECHECK = (
    "compute-sanitizer", "--tool", "racecheck", "--print-limit", "0",
    "--kernel-name", "regex=attention|ten_lines",
)  # fmt: skip
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--print-limit", "0")
LOST_WAIT = ("--mods", "window", "--head-dims", "64", "--without-wait", "1")
"""A backward for short ranges whose warps read which queries come before they are told."""


@dataclass(frozen=True, slots=True)
class Check:
    """A run under a tool, and whether it is to find races."""

    what: str
    command: Sequence[str]
    finds: bool = False

    def holds(self) -> bool:
        """Run it, and print how that went."""
        done = subprocess.run(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = remaining(done.stdout.splitlines())
        right = not found.faults and bool(found.races) == self.finds
        print(f"{self.what}: {len(found.races)} races, {'as it should be' if right else 'WRONG'}", flush=True)
        if not right:
            print(*found.faults, *dict.fromkeys(found.races), sep="\n", flush=True)
        return right


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, str(Path(__file__).with_name(name)), *arguments


def checks(part: Sequence[str]) -> list[Check]:
    """Of the tool first, then of the kernels; `part` are arguments of small_runs.py."""
    each = "--every-thread-arrives"
    return [
        Check("ten lines, one thread arrives", (*RACECHECK, *_script("ten_lines.py")), finds=True),
        Check("ten lines, every thread arrives", (*RACECHECK, *_script("ten_lines.py", each))),
        Check("a lost wait", (*RACECHECK, *_script("small_runs.py", each, *LOST_WAIT)), finds=True),
        Check("races", (*RACECHECK, *_script("small_runs.py", each, *part))),
        Check("bad accesses", (*MEMCHECK, *_script("small_runs.py", *part))),
    ]


if __name__ == "__main__":
    wrong = [check.what for check in checks(sys.argv[1:]) if not check.holds()]
    sys.exit(bool(wrong))
