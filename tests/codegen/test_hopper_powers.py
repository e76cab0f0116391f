"""Powers of two by multiplications, as the assembly of a bounded kernel computes them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flexc import masks, scores
from flexc.codegen.design import Design
from flexc.codegen.softmax_form import MOST_SHIFT, NEAR_ZERO, is_near_zero
from flexc.resolve import resolve
from tests.codegen.generate import generate
from tests.ptx_in_numpy import arithmetic

CAP = scores.softcap(30.0)
FURTHEST = NEAR_ZERO * 1.4426950408889634 + MOST_SHIFT


def _assembly(head_dim: int) -> tuple[str, int]:
    """The assembly of a kernel's powers, and how many of them share it."""
    source = generate(masks.causal, CAP, design=Design.HOPPER, head_dim=head_dim, bounded=True).source
    function = source[source.index("def powers_of_two(") :].partition("@gluon.jit")[0]
    text = re.search(r'"""(\s+\{.*?)"""|"(ex2.*?)"', function, re.DOTALL)
    assert text is not None
    found = re.search(r"pack=(\d)", function)
    assert found is not None
    return text[1] or text[2], int(found[1])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_powers(head_dim: int) -> None:
    text, pack = _assembly(head_dim)
    x = np.linspace(-FURTHEST, FURTHEST, 80_000, dtype=np.float32)
    x[:8] = [0.0, 1.0, -1.0, 0.5, -0.5, 2.5, 24.0, -FURTHEST]
    found = arithmetic(text, [np.repeat(x, pack)], pack).astype(np.float64).reshape(-1, pack)
    wanted = np.exp2(x.astype(np.float64))[:, None]
    assert np.abs(found / wanted - 1).max() < 8e-5


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_stays(head_dim: int) -> None:
    text, pack = _assembly(head_dim)
    assert np.isnan(arithmetic(text, [np.full(pack, np.nan)], pack)).all()


def test_three_of_eight_only_where_exponentials_and_tangents_meet_in_narrow_heads() -> None:
    assert _assembly(64)[1] == 8
    assert _assembly(128)[1] == 1


def test_sums_of_the_largest_weights_fit_a_float() -> None:
    assert FURTHEST + 29 < 127, "2**29 keys"


@pytest.mark.parametrize(
    ("cap", "is_near"), [(30.0, True), (-50.0, True), (50.5, False), (float("inf"), False)]
)
def test_caps(cap: float, is_near: bool) -> None:
    mods, values, _ = resolve(scores.softcap(cap), None)
    assert is_near_zero(mods.score, values) is is_near
    assert not is_near_zero(mods.score, ()), "a captured number is not known ahead"
