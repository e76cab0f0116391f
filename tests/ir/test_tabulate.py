"""Parts of a mask of one index as tables: which, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flexc.ir import tabulate as module
from flexc.ir.arrays import Arrays
from flexc.ir.build import binary, compare, const, input_, load, logic
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.ops import Input, Op
from flexc.ir.runs import TileGrid
from flexc.ir.tabulate import tabulate
from flexc.ir.types import DType

Q, KV, B, H = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H))
GRID = TileGrid(90, 70, 16, 16, 2, 3)
CAUSAL = compare(Op.LE, KV, Q)


def mod(x: Expr, by: int) -> Expr:
    return binary(Op.MOD, x, const(by))


def at(slot: int, *indices: Expr) -> Expr:
    return load(slot, indices, DType.I32)


def both(*parts: Expr) -> Expr:
    result = parts[0]
    for part in parts[1:]:
        result = logic(Op.AND, result, part)
    return result


def values() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.permutation(90).astype(np.int32), rng.integers(0, 9, (2, 90)).astype(np.int32)]


TIGHT = {
    "causal": CAUSAL,
    "window": both(CAUSAL, compare(Op.LT, binary(Op.SUB, Q, KV), const(9))),
    "ids": compare(Op.EQ, at(0, Q), at(0, KV)),
    "ids of a batch": compare(Op.EQ, at(1, B, Q), at(1, B, KV)),
    "chunks": compare(Op.EQ, binary(Op.FLOORDIV, Q, const(7)), binary(Op.FLOORDIV, KV, const(7))),
}
LOOSE = {
    "remainders": (compare(Op.EQ, mod(Q, 7), mod(KV, 5)), [(70,), (90,)]),
    "a permutation": (compare(Op.LE, mod(at(0, KV), 9), Q), [(70,)]),
    "look-ups of look-ups": (compare(Op.LE, at(0, at(0, Q)), KV), [(90,)]),
    "by batch": (compare(Op.LE, mod(at(1, B, KV), 3), Q), [(2, 70)]),
    "by head": (compare(Op.LE, binary(Op.MUL, mod(KV, 3), H), Q), [(3, 70)]),
    "conditions of a row": (both(CAUSAL, both(compare(Op.LT, Q, const(9)), compare(Op.EQ, Q, H))), [(3, 90)]),
}


@pytest.mark.parametrize("name", TIGHT)
def test_what_intervals_are_exact_for_stays(name: str) -> None:
    known = tabulate(TIGHT[name], values(), GRID, Arrays(np))
    assert known.mask is TIGHT[name]
    assert len(known.values) == 2


@pytest.mark.parametrize("xp", [np, torch])
@pytest.mark.parametrize("name", LOOSE)
def test_tables_mean_the_same(name: str, xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, shapes = LOOSE[name]
    captures = [xp.asarray(x) for x in values()]
    inputs = {
        which: xp.arange(n, dtype=xp.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (which, n) in enumerate([(Input.B, 2), (Input.H, 3), (Input.Q_IDX, 90), (Input.KV_IDX, 70)])
    }
    expected = evaluate(mask, Env(inputs, captures, xp, xp.float32))
    for chunk in (module._CHUNK, 32):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        known = tabulate(mask, captures, GRID, Arrays(xp, None if xp is np else "cpu"))
        assert known.mask is not mask
        assert [tuple(x.shape) for x in known.values[2:]] == shapes
        again = evaluate(known.mask, Env(inputs, known.values, xp, xp.float32))
        np.testing.assert_array_equal(np.broadcast_to(again, expected.shape), expected)


def test_tables_that_would_be_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, _ = LOOSE["remainders"]
    monkeypatch.setattr(module, "_MOST_ELEMENTS", 80)
    known = tabulate(mask, values(), GRID, Arrays(np))
    assert [x.shape for x in known.values[2:]] == [(70,)]
