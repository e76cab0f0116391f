"""Mods made anew whose captures are defaults, bound arguments or attributes: traced once, right gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import flexc
from flexc import mask_mod, score_mod
from flexc.mods import as_score_mod
from tests.runtime.bound_mods import Biased, add, add_named
from tests.runtime.retraced import check_trace

Score = Callable[..., Any]
FIRST = Biased(torch.zeros(9), 3.0)


@dataclass
class _Slope:
    """A mod of a generated class, over a list and a dict."""

    tables: list[torch.Tensor]
    numbers: dict[str, float]

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.numbers["factor"] * score + self.tables[0][kv_idx] + self.numbers["shift"]


class _Slotted:
    __slots__ = ("__weakref__", "bias")

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.bias[kv_idx]


class _Module(torch.nn.Module):
    def __init__(self, bias: torch.Tensor, factor: float) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(bias.detach()) if isinstance(bias, torch.nn.Parameter) else bias
        self.factor = factor

    def forward(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.factor * self.bias[kv_idx]


class _Pair(NamedTuple):
    bias: torch.Tensor
    factors: list[float]


def _of_default(bias: torch.Tensor, factor: float) -> Score:
    return lambda s, b, h, q_idx, kv_idx, bias=bias, factor=factor: s + factor * bias[kv_idx]


def _of_keyword(bias: torch.Tensor, factor: float) -> Score:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, bias: Any = bias, f: Any = factor) -> Any:
        return s + f * bias[kv_idx]

    return score


def _of_both(bias: torch.Tensor, factor: float) -> Score:
    def inner(x: Any, kv_idx: Any, *, bias: Any = bias, twice: Any = 2) -> Any:
        return x + bias[kv_idx] * twice

    return lambda s, b, h, q_idx, kv_idx, factor=factor: inner(s, kv_idx) * factor


def _of_tuple(bias: torch.Tensor, factor: float) -> Score:
    return lambda s, b, h, q_idx, kv_idx, both=(bias, factor): s + both[1] * both[0][kv_idx]


def _of_a_named_tuple_in_a_closure(bias: torch.Tensor, factor: float) -> Score:
    pair = _Pair(bias, [factor])
    return lambda s, b, h, q_idx, kv_idx: s + pair.factors[0] * pair.bias[kv_idx]


def _of_nested_partials(bias: torch.Tensor, factor: float) -> Score:
    first = partial(add_named, bias=bias)
    first.note = "a partial with attributes of its own is not merged"  # type: ignore[attr-defined]
    return partial(first, factor=factor)


def _of_a_partial_in_a_closure(bias: torch.Tensor, factor: float) -> Score:
    mod = partial(add, bias)
    return lambda s, b, h, q_idx, kv_idx: mod(s * factor, b, h, q_idx, kv_idx)


def _of_a_method_in_a_closure(bias: torch.Tensor, factor: float) -> Score:
    mod = Biased(bias, factor).twice
    return lambda s, b, h, q_idx, kv_idx: mod(s, b, h, q_idx, kv_idx)


def _of_a_partial_of_an_object(bias: torch.Tensor, factor: float) -> Score:
    def call(mod: Score, x: float, *args: Any) -> Any:
        return mod(*args) * x

    return partial(call, partial(Biased(bias).twice), factor)


MAKERS: dict[str, Callable[[torch.Tensor, float], Score]] = {
    "default": _of_default,
    "keyword": _of_keyword,
    "both, of functions inside": _of_both,
    "tuple": _of_tuple,
    "named tuple and list in a closure": _of_a_named_tuple_in_a_closure,
    "partial": lambda bias, factor: partial(add, bias),
    "partial by name": lambda bias, factor: partial(add_named, bias=bias, factor=factor),
    "nested partials": _of_nested_partials,
    "partial in a closure": _of_a_partial_in_a_closure,
    "object": Biased,
    "object of a generated class": lambda bias, factor: _Slope([bias], {"factor": factor, "shift": 0.5}),
    "object with slots": lambda bias, factor: _Slotted(bias),
    "module": _Module,
    "method": lambda bias, factor: Biased(bias, factor).twice,
    "method in a closure": _of_a_method_in_a_closure,
    "partial of a method": _of_a_partial_of_an_object,
}


@pytest.mark.parametrize("form", MAKERS)
def test_another_function_of_the_same_code_is_not_traced(traced: list[Any], form: str) -> None:
    for n in range(4):
        check_trace(as_score_mod(MAKERS[form](torch.randn(5 + n), n + 0.5)))
    assert len(traced) == 1
    for n in range(2):
        check_trace(as_score_mod(MAKERS[form](torch.randn(5 + n).bfloat16(), n + 0.5)))
    assert len(traced) == 2


@pytest.mark.parametrize("form", MAKERS)
def test_gradients_of_bound_tensors(traced: list[Any], form: str) -> None:
    for n in range(3):
        q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64).unbind()
        found = []
        for backend in ("cpu", "reference"):
            bias = torch.linspace(-1, 1, 9, dtype=torch.float64).add(n).requires_grad_()
            out = flexc.attention(q, k, v, score_mod=MAKERS[form](bias, n + 0.5), backend=backend)
            found.append(torch.autograd.grad(out.square().sum(), bias)[0])
        q_k = (q @ k.transpose(2, 3) / 2).requires_grad_()
        bias = torch.linspace(-1, 1, 9, dtype=torch.float64).add(n).requires_grad_()
        score = MAKERS[form](bias, n + 0.5)(q_k, 0, 0, torch.arange(9)[:, None], torch.arange(9))
        expected = torch.autograd.grad((score.softmax(-1) @ v).square().sum(), bias)[0]
        assert expected.abs().max() > 0.01
        for grad in found:
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    assert len(traced) == 1


def test_defaults_that_are_assigned_again(traced: list[Any]) -> None:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, shift: Any = 1, *, factor: Any = 2) -> Any:
        return s * factor + shift

    mod = score_mod(score)
    assert mod.trace().values == (2, 1)
    score.__defaults__ = (5,)
    assert mod.trace().values == (2, 5)
    score.__kwdefaults__ = {"factor": 7}
    assert mod.trace().values == (7, 5)
    assert len(traced) == 1
    score.__defaults__ = (5.5,)
    check_trace(mod)
    assert len(traced) == 2


def test_keywords_of_a_partial_and_attributes_that_change(traced: list[Any]) -> None:
    bias = torch.randn(9)
    bound = partial(add_named, bias=bias, factor=2.0)
    thing = Biased(bias, 2.0)
    for factor in (2.0, 3.0, 4.0):
        bound.keywords["factor"] = thing._factor = factor
        for mod in (as_score_mod(bound), as_score_mod(thing), as_score_mod(thing.twice)):
            assert factor in [x for x in mod.trace().values if isinstance(x, float)]
    assert len(traced) == 3
    thing.bias = torch.randn(9, 1)
    with pytest.raises(flexc.FlexcError):
        as_score_mod(thing).trace()


def test_kinds_of_bound_values_are_told_apart(traced: list[Any]) -> None:
    bias = torch.randn(9)
    for _ in range(2):
        for value in (2, 2.0, True, bias.bfloat16()[3]):
            for mod in (partial(add_named, bias=bias, factor=value), Biased(bias, value)):  # type: ignore[arg-type]
                check_trace(as_score_mod(mod))
    assert len(traced) == 8


def test_one_tensor_or_two(traced: list[Any]) -> None:
    def both(one: Any, other: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + one[q_idx] + other[kv_idx]

    x, y = torch.randn(2, 9).unbind()
    for one, other in ((x, x), (x, y), (y, y), (y, x), (x.clone(), x)):
        check_trace(score_mod(partial(both, one, other)))
        check_trace(score_mod(lambda s, b, h, q, k, one=one, other=other: both(one, other, s, b, h, q, k)))
    assert len(traced) == 4


def test_bound_functions_and_names_decide(traced: list[Any]) -> None:
    def near(q_idx: Any, kv_idx: Any, width: int = 3) -> Any:
        return q_idx - kv_idx < width

    def far(q_idx: Any, kv_idx: Any, width: int = 3) -> Any:
        return q_idx - kv_idx >= width

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, test: Any, kind: str) -> Any:
        found = test(q_idx, kv_idx)
        return ~found if kind == "not" else found

    for _ in range(2):
        for test in (near, far):
            for kind in ("not", "so"):
                check_trace(mask_mod(partial(mask, test=test, kind=kind)))
    assert len(traced) == 4
    check_trace(mask_mod(partial(mask, test=partial(near, width=9), kind="so")))
    check_trace(mask_mod(partial(mask, test=partial(near, width=10), kind="so")))
    assert len(traced) == 5


def test_an_object_that_is_compared_as_a_whole_is_traced(traced: list[Any]) -> None:
    class Compares(Biased):
        def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + 1 if self == FIRST else score

    for factor in (3.0, 3.0, 2.0, 3.0):
        check_trace(as_score_mod(Compares(torch.zeros(9), factor)))
    assert len(traced) == 4


def test_the_class_of_an_object_decides(traced: list[Any]) -> None:
    class Other(Biased):
        shift = 7

    bias = torch.randn(9)
    for _ in range(2):
        check_trace(as_score_mod(Biased(bias)))
        check_trace(as_score_mod(Other(bias)))
    assert len(traced) == 2


def test_a_class_method_is_traced_once(traced: list[Any]) -> None:
    for _ in range(3):
        check_trace(as_score_mod(Biased.of_class))
    assert len(traced) == 1


def test_numbers_that_python_needs(traced: list[Any]) -> None:
    def powers(count: int, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for _ in range(count):
            score = score * score
        return score

    for count in (2, 2, 3, 3):
        check_trace(score_mod(partial(powers, count)))
    assert len(traced) == 2


class _Settings:
    factor: float


class _Optional:
    """A mod that looks whether it has a bias, and whether what it was given has a factor."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if hasattr(self, "bias"):
            score = score + self.bias[kv_idx]
        return score * getattr(self.settings, "factor", 1.0)


def test_attributes_that_come_and_go(traced: list[Any]) -> None:
    settings = _Settings()
    for _ in range(2):  # made anew: the settings are the same object
        mod = as_score_mod(_Optional(settings))
        check_trace(mod)
    assert len(traced) == 1
    vars(mod.function)["bias"] = torch.randn(9)
    check_trace(mod)
    settings.factor = 2.0
    check_trace(mod)
    check_trace(as_score_mod(_Optional(settings)))
    del vars(mod.function)["bias"], settings.factor
    check_trace(mod)
    check_trace(as_score_mod(_Optional(settings)))


class _Helped:
    """A mod, or what one is given, with a method that an attribute may hide."""

    def __init__(self, helper: Any = None) -> None:
        self.helper = helper

    def change(self, score: Any) -> Any:
        return score * 2.0

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.change(self.helper.change(score) + 1.0)


def test_an_attribute_that_hides_a_method(traced: list[Any]) -> None:
    helper = _Helped()
    for _ in range(2):
        mod = as_score_mod(_Helped(helper))
        check_trace(mod)
    assert len(traced) == 1
    for owner in (mod.function, helper):
        vars(owner)["change"] = lambda score: score * 3.0
        check_trace(mod)
        check_trace(as_score_mod(_Helped(helper)))
        del vars(owner)["change"]
        check_trace(mod)
