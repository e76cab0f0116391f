"""PTX in which every thread arrives: what it says, that ptxas takes it, and that it makes no order up."""

from __future__ import annotations

import pytest

from tests.ptx_arrivals import Unmet, of_every_thread

ARRIVAL = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"
EXPECTATION = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;"
WARP, GROUP = "bar.warp.sync \t-1;", "bar.sync \t2, 128;"


def _lines(*lines: str) -> str:
    return of_every_thread("\n".join(lines))


def test_all_threads_of_a_warpgroup_arrive() -> None:
    found = _lines("@%p1 mbarrier.init.shared::cta.b64 [%r1], 2;", GROUP, "add.s32 %r1, %r2, 8;", ARRIVAL)
    assert "[%r1], 256;" in found
    assert "bar.red.or.pred all, 2, 128, %p1;" in found
    assert "@all mbarrier.arrive.shared::cta.b64 _, [%r1], 1;" in found


def test_all_lanes_arrive_where_they_met() -> None:
    assert "@all mbarrier.arrive.shared::cta.b64 _, [%r1], 4;" in _lines(WARP, ARRIVAL)
    found = _lines(WARP, EXPECTATION)
    assert found.count(EXPECTATION) == 1
    shares = 1 + 3 + 31 * 4
    assert shares == 128
    assert "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 3;" in found
    assert "@others mbarrier.arrive.shared::cta.b64 _, [%r1], 4;" in found


def test_one_lane_speaks_of_its_bytes_alone() -> None:
    copy = "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 512, [%r1];"
    found = _lines(WARP, copy, EXPECTATION)
    assert "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 127;" in found
    assert "others" not in found


@pytest.mark.parametrize("between", ["st.shared.b32 [%r5], %r6;", "$L__BB0_1:", "ld.shared.b32 %r5, [%r6];"])
def test_nobody_arrives_for_threads_that_it_did_not_meet(between: str) -> None:
    with pytest.raises(Unmet):
        _lines(GROUP, between, ARRIVAL)


def test_lanes_do_not_leave_numbers_without_meeting() -> None:
    with pytest.raises(Unmet, match=r"st\.shared"):
        _lines(WARP, "st.shared.b32 [%r5], %r6;", EXPECTATION)


def test_one_warpgroup_stays_as_it_is() -> None:
    kernel = (".reqntid 128", "st.shared.b32 [%r5], %r6;", EXPECTATION)
    assert _lines(*kernel) == "\n".join(kernel)
    with pytest.raises(Unmet):
        _lines(*kernel, ARRIVAL)
    with pytest.raises(Unmet):
        _lines(".reqntid 256", *kernel[1:])


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        _lines(GROUP, "mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], 1;")
