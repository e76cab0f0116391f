"""Captured numbers: run-time values, unless Python itself needs them."""

from __future__ import annotations

import math
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
import torch

from flexc.ir.types import Storage
from flexc.mods import mask_mod
from tests.frontend.captured import check

WINDOW = 5


def test_closure_numbers_are_run_time_values() -> None:
    size = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert made.values == (3,)
    size = 7
    again = check(mask, mod.trace())
    assert again.values == (7,)
    assert again.graph is made.graph, "not traced again"
    assert mod.trace() is again


def test_global_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < WINDOW

    mod = mask_mod(mask)
    made = mod.trace()
    monkeypatch.setitem(globals(), "WINDOW", 9)
    again = check(mask, mod.trace())
    assert (made.values, again.values) == ((5,), (9,))
    assert again.graph is made.graph
    monkeypatch.setitem(globals(), "WINDOW", 2.5)
    assert check(mask, mod.trace()).graph is not made.graph, "a float is another kind of number"


def test_arithmetic_on_numbers_is_pythons() -> None:
    big, small, ratio = 50_000, 3, 0.1

    def mask(b, h, q_idx, kv_idx):
        exact = big * big + small // -2 - (-7) % small + (1 << small) + small**2
        return (q_idx * 200_000_000.0 < exact) & (kv_idx * ratio < small / 7 + math.floor(small * 0.5))

    made = check(mask)
    assert 50_000 * 50_000 - 2 - 2 + 8 + 9 in made.values
    assert Storage.I64 in [capture.storage for capture in made.graph.captures]


def test_wider_number_is_traced_again() -> None:
    size = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx < size

    mod = mask_mod(mask)
    made = mod.trace()
    size = 2**40
    again = mod.trace()
    assert again.graph is not made.graph
    assert again.graph.captures[0].storage is Storage.I64


def test_python_needs_the_number() -> None:
    count, enabled, scale = 3, True, 4

    def mask(b, h, q_idx, kv_idx):
        result = q_idx < 0
        for i in range(count):
            result = result | (kv_idx == i)
        if enabled and scale > 2:
            result = result | (q_idx == round(math.sqrt(scale)))
        return result

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert made.values == ()
    assert mod.trace() is made
    count = 5
    again = check(mask, mod.trace())
    assert again.graph is not made.graph
    enabled = False
    check(mask, mod.trace())
    enabled, scale = True, 9
    check(mask, mod.trace())


def test_a_branch_guards_the_answer_not_the_number() -> None:
    size = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size if size > 0 else q_idx >= kv_idx

    mod = mask_mod(mask)
    made = mod.trace()
    size = 8
    assert check(mask, mod.trace()).graph is made.graph
    size = 0
    assert check(mask, mod.trace()).graph is not made.graph


def test_numbers_pass_where_python_numbers_do() -> None:
    size, factor = 4, 0.5

    def mask(b, h, q_idx, kv_idx):
        assert isinstance(size, int)
        assert isinstance(factor, float)
        assert not isinstance(size, bool)
        low = torch.clamp(kv_idx, min=0, max=size)
        full = torch.full((), size) + torch.tensor(factor) + torch.full_like(q_idx, size)
        return (torch.where(q_idx > size, size, low) < full) | (min(size, 3) == kv_idx) | (f"{size}" == "7")

    check(mask)


def test_enum_members_and_numpy_numbers_are_guarded() -> None:
    class Size(IntEnum):
        SMALL = 3
        LARGE = 6

    size, other = Size.SMALL, np.int64(4)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < size) | (kv_idx < other)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    size = Size.LARGE
    check(mask, mod.trace())
    other = np.int64(9)
    check(mask, mod.trace())


def test_fractions_and_decimals_compute_as_they_are() -> None:
    share, step = Fraction(1, 3), Decimal("2.5")

    def mask(b, h, q_idx, kv_idx):
        return (q_idx * float(share + 1) >= kv_idx) & (kv_idx < float(step * 2)) & (q_idx != share)

    mod = mask_mod(mask)
    first = check(mask, mod.trace()).graph
    share = Fraction(2, 6)  # an equal one
    assert check(mask, mod.trace()).graph is first
    share = Fraction(-1, 2)
    assert check(mask, mod.trace()).graph is not first
