"""torch.compile and mods whose captures are defaults, bound arguments or attributes; floats that change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import flexc
from tests.runtime.bound_mods import Biased, add_named
from tests.runtime.test_torch_compile import Counted

# The compiler's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

MAKERS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "closure": lambda bias, factor: lambda s, b, h, q_idx, kv_idx: s + factor * bias[kv_idx],
    "default": lambda bias, factor: lambda s, b, h, q_idx, kv_idx, x=bias, f=factor: s + f * x[kv_idx],
    "keyword": lambda bias, factor: lambda s, b, h, q_idx, kv_idx, *, x=bias, f=factor: s + f * x[kv_idx],
    "partial": lambda bias, factor: partial(add_named, bias=bias, factor=factor),
    "object": Biased,
    "method": lambda bias, factor: Biased(bias, factor).twice,
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# A float that is stored in an object made there is a constant to torch.compile.
@pytest.mark.parametrize("form", [form for form in MAKERS if form not in ("object", "method")])
def test_made_in_a_compiled_function(form: str) -> None:
    def inside(q: torch.Tensor, bias: torch.Tensor, factor: float) -> torch.Tensor:
        return flexc.attention(q, q, q, score_mod=MAKERS[form](bias, factor))

    compiled, counts = Counted(inside), []
    for n in range(4):
        q, bias = torch.randn(1, 2, 9, 4), torch.randn(9)
        for ours in (compiled(q, bias, n + 0.5), inside(q, bias, n + 0.5)):
            expected = flexc.attention(q, q, q, score_mod=MAKERS[form](bias, n + 0.5), backend="reference")
            torch.testing.assert_close(ours, expected)
        counts.append(compiled.count)
    assert counts[1] == counts[-1]  # compiled for the first number, and for any


@pytest.mark.parametrize("form", MAKERS)
def test_made_outside_with_other_tensors(form: str) -> None:
    def outside(q: torch.Tensor, mod: Any) -> torch.Tensor:
        return flexc.attention(q, q, q, score_mod=mod)

    compiled = Counted(outside)
    for _ in range(4):
        q, mod = torch.randn(1, 2, 9, 4), MAKERS[form](torch.randn(9), 0.5)
        torch.testing.assert_close(compiled(q, mod), outside(q, mod))
    assert compiled.count == 1


def _follows_a_float(compiled: Counted, inside: Callable[..., torch.Tensor]) -> None:
    """With other floats results and gradients are those of eager calls, without a third compilation."""
    counts = []
    for n in range(4):
        q, bias = torch.randn(1, 2, 9, 4, requires_grad=True), torch.randn(9, requires_grad=True)
        ours, theirs = compiled(q, bias, n + 0.5), inside(q, bias, n + 0.5)
        torch.testing.assert_close(ours, theirs)
        found = [torch.autograd.grad(x.square().sum(), (q, bias)) for x in (ours, theirs)]
        torch.testing.assert_close(found[0], found[1])
        counts.append(compiled.count)
    assert counts[1] == counts[-1]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_with_a_float_that_changes(backend: str) -> None:
    def inside(q: torch.Tensor, bias: torch.Tensor, factor: float) -> torch.Tensor:
        def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return s * (factor + 1) - bias[kv_idx] / factor

        return flexc.attention(q, q, q, score_mod=score)

    _follows_a_float(Counted(inside, backend), inside)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_floats_that_are_computed_outside_of_mods(backend: str, dynamic: bool | None) -> None:
    """Also as a bound of a mask's keys, and as the scale."""

    def inside(q: torch.Tensor, bias: torch.Tensor, number: float) -> torch.Tensor:
        factor, share, half = number * 2 + 1, 1 / number, Biased(bias, number / 2)

        def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return half(s * factor, b, h, q_idx, kv_idx)

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx * share <= q_idx

        return flexc.attention(q, q, q, score_mod=score, mask_mod=mask, scale=math.sqrt(number)) * factor

    _follows_a_float(Counted(inside, backend, dynamic=dynamic), inside)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_scale_that_changes(backend: str) -> None:
    def inside(q: torch.Tensor, scale: float) -> torch.Tensor:
        return flexc.attention(q, q, q, score_mod=lambda s, b, h, q_idx, kv_idx: s * scale, scale=scale)

    compiled, counts = Counted(inside, backend), []
    for n in (1, 2, 0, 3, -1):
        q = torch.randn(1, 2, 9, 4)
        torch.testing.assert_close(compiled(q, n / 8), inside(q, n / 8))
        counts.append(compiled.count)
    assert counts[1] == counts[-1]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_in_a_tensor(shape: tuple[int, ...]) -> None:
    def inside(q: torch.Tensor, scale: Any) -> torch.Tensor:
        return flexc.attention(q, q, q, scale=scale)

    compiled, q = Counted(inside), torch.randn(1, 2, 9, 4)
    for n in range(3):
        scale = torch.full(shape, n / 2)
        torch.testing.assert_close(compiled(q, scale), inside(q, scale))
    assert compiled.count == 1


def _unpacked(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = x.min(-1)[0] * (x.min(-1).indices + 1)
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        lambda x: x.max(-1).values,
        lambda x: torch.min(x, -1)[0],
        lambda x: x.max(-1, keepdim=True)[1][0],
        _unpacked,
    ],
    ids=["values", "first", "indices", "both"],
)
def test_largest_along_a_dimension(chosen: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def inside(q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return s + chosen(table[kv_idx])

        return flexc.attention(q, q, q, score_mod=score)

    q, table = torch.randn(1, 2, 9, 4), torch.randn(9, 3)
    torch.testing.assert_close(Counted(inside)(q, table), inside(q, table))
