"""What is left of a report of racecheck, as it printed them on an H200."""

from __future__ import annotations

import pytest

from tests.gpu.races import Findings, remaining

BEGIN = """\
========= COMPUTE-SANITIZER
window 64 any
========= Error: Race reported between Read access at attention_forward+0x270 in attention_forward_0.py:518
=========     and Write access at attention_forward+0x13720 in attention_forward_0.py:518 [11 hazards]
=========     and Write access at attention_forward+0x1afb0 in attention_forward_0.py:574 [6 hazards]
=========
"""
TOLD = """\
========= Error: Race reported between Write access at attention_backward+0x10c0 in backward_0.py:173
=========     and Read access at attention_backward+0x3310 in attention_backward_0.py:179 [60 hazards]
=========
"""
END = """\
========= Error: Race reported between Read access at attention_backward+0x100 in attention_backward_0.py:542
=========     and Write access at attention_backward+0x2fd0 in attention_backward_0.py:542 [4 hazards]
=========     and Write access at attention_backward+0x9be0 in attention_backward_0.py:588 [25 hazards]
=========
    hands over: attention_forward 518 574
    hands over: attention_backward 542 588
"""


def _found(*parts: str, races: int) -> Findings:
    s = "" if races == 1 else "s"
    end = f"all ran\n========= RACECHECK SUMMARY: {races} hazard{s} displayed ({races} error{s})\n"
    return remaining("".join((*parts, end)).splitlines(keepends=True))


def _left(*parts: str, races: int) -> list[str]:
    found = _found(*parts, races=races)
    assert found.faults == []
    return found.races


def test_handing_over_is_left_out() -> None:
    assert _left(BEGIN, END, races=2) == []


def test_other_races_are_left() -> None:
    assert _left(BEGIN, TOLD, END, races=3) == [
        "Write at attention_backward:173, Read at attention_backward:179"
    ]


def test_one_race_of_many() -> None:
    assert _left(TOLD, races=1) == ["Write at attention_backward:173, Read at attention_backward:179"]
    assert _left(TOLD + TOLD.replace("Error:", "Warning:"), races=2) == _left(TOLD, races=1) * 2


def test_lines_of_another_kernel_are_no_excuse() -> None:
    other = END.replace("hands over: attention_backward 542 588", "hands over: attention_backward 600 650")
    assert _left(BEGIN, other, races=2) == [
        "Read at attention_backward:542, Write at attention_backward:542",
        "Read at attention_backward:542, Write at attention_backward:588",
    ]


def test_one_access_that_hands_over_is_no_excuse() -> None:
    mixed = TOLD.replace(":179", ":588")
    assert _left(BEGIN, mixed, END, races=3) == [
        "Write at attention_backward:173, Read at attention_backward:588"
    ]


def test_later_cases_do_not_excuse_earlier_ones() -> None:
    assert (
        _left(BEGIN, TOLD, END, TOLD, END, races=5)
        == ["Write at attention_backward:173, Read at attention_backward:179"] * 2
    )


def test_reports_that_end_early_or_leave_out_races() -> None:
    assert remaining((BEGIN + END).splitlines()).faults == [
        "2 races are shown, and there are 0: pass --print-limit 0",
        "no tool looked at it",
        "it did not end",
    ]
    assert _found(BEGIN, END, races=3).faults == [
        "2 races are shown, and there are 3: pass --print-limit 0",
    ]


def test_errors_that_are_no_races() -> None:
    broken = "========= Error: No attachable process found. compute-sanitizer timed-out.\n"
    assert _found(broken, BEGIN, END, races=2).faults == [broken.strip()]


@pytest.mark.parametrize(
    ("summary", "faults"), [("0 errors", []), ("1 error", ["1 errors"]), ("9 errors", ["9 errors"])]
)
def test_bad_accesses(summary: str, faults: list[str]) -> None:
    access = "========= Invalid __shared__ read of size 4 bytes\n"
    assert remaining([access, "all ran", f"========= ERROR SUMMARY: {summary}"]) == Findings([], faults)
