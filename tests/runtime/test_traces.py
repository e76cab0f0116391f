"""Mods that are made anew each step: when an earlier trace serves them, and when it must not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import flexc
from flexc import mask_mod, masks, score_mod, traces
from flexc.mods import Mod, as_mask_mod, as_score_mod
from tests.runtime.bound_mods import Biased, add, add_named
from tests.runtime.retraced import check_trace

GLOBAL = 3


def _biased(bias: torch.Tensor, shift: int | float) -> Mod:
    return score_mod(lambda score, b, h, q_idx, kv_idx: score + shift * bias[kv_idx])


def test_other_numbers_and_tensors(traced: list[Any]) -> None:
    for n in range(4):
        check_trace(_biased(torch.randn(5 + n), n))
    assert len(traced) == 1


def test_other_kinds_of_captures(traced: list[Any]) -> None:
    bias = torch.randn(5)
    for _ in range(2):
        for mod in (_biased(bias, 2), _biased(bias, 2.0), _biased(bias.bfloat16(), 2), _biased(bias, True)):
            check_trace(mod)
    assert len(traced) == 4


def test_a_mod_that_is_kept_sees_its_own_changes(traced: list[Any]) -> None:
    def make(width: int) -> tuple[Mod, Callable[[int], None]]:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return q_idx - kv_idx < width

        def write(value: int) -> None:
            nonlocal width
            width = value

        return mask_mod(mask), write

    (first, write), (second, _) = make(3), make(4)
    assert (first.trace().values, second.trace().values) == ((3,), (4,))
    write(9)
    assert (first.trace().values, second.trace().values) == ((9,), (4,))
    assert len(traced) == 1


def test_numbers_that_python_needs(traced: list[Any]) -> None:
    def make(count: int) -> Mod:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            allowed = q_idx == kv_idx
            for n in range(count):
                allowed = allowed | (q_idx - kv_idx == 2 * n)
            return allowed

        return mask_mod(mask)

    for count in (2, 2, 3, 3, 2):
        check_trace(make(count))
    assert len(traced) == 3


def test_functions_inside_of_functions(traced: list[Any]) -> None:
    def make(width: int, table: torch.Tensor, strict: bool) -> Mod:
        def near(q_idx: Any, kv_idx: Any) -> Any:
            return q_idx - kv_idx < width

        def nearer(q_idx: Any, kv_idx: Any) -> Any:
            return q_idx - kv_idx <= width

        chosen = near if strict else nearer
        return mask_mod(lambda b, h, q_idx, kv_idx: chosen(q_idx, kv_idx) & (table[q_idx] == table[kv_idx]))

    for n in range(3):
        check_trace(make(n, torch.arange(9), True))
    assert len(traced) == 1
    for n in range(3):
        check_trace(make(n, torch.arange(9), False))
    assert len(traced) == 2


def test_compositions_and_ready_made_masks(traced: list[Any]) -> None:
    for n in range(1, 4):
        ids = torch.arange(9) // n
        check_trace(masks.causal & masks.document(ids))
        check_trace(masks.causal | masks.document(ids))
        check_trace(~masks.sliding_window(n) & (lambda b, h, q_idx, kv_idx, n=n: kv_idx > n))
        check_trace(as_mask_mod(masks.sliding_window(n)))
    assert len(traced) == 4


def test_one_tensor_or_two(traced: list[Any]) -> None:
    def make(one: torch.Tensor, other: torch.Tensor) -> Mod:
        return score_mod(lambda score, b, h, q_idx, kv_idx: score + one[q_idx] + other[kv_idx])

    x, y = torch.randn(2, 9).unbind()
    for pair in ((x, x), (x, y), (y, y), (y, x), (x.clone(), x)):
        check_trace(make(*pair))
    assert len(traced) == 2


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(9))
        self.width = 4
        self.plan = type("Plan", (), {"scale": 0.5})()

    def mod(self) -> Mod:
        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            near = q_idx - kv_idx < self.width
            return torch.where(near, score * self.plan.scale + self.bias[kv_idx], score)

        return as_score_mod(score)


def test_attributes_of_an_object(traced: list[Any]) -> None:
    layers = [_Layer(), _Layer()]
    for n in range(3):
        for layer in layers:
            layer.width = n
            layer.bias = torch.nn.Parameter(torch.randn(9))
            layer.plan.scale = n + 0.25
            check_trace(layer.mod())
    assert len(traced) == 2
    layers[0].plan = type("Plan", (), {"scale": 2.5})()
    check_trace(layers[0].mod())
    assert len(traced) == 3


def test_globals(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Mod:
        return mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < GLOBAL)

    check_trace(make())
    monkeypatch.setitem(globals(), "GLOBAL", 7)
    check_trace(make())
    assert len(traced) == 1
    monkeypatch.setitem(globals(), "GLOBAL", torch.tensor(2))
    check_trace(make())
    assert len(traced) == 2


def test_what_is_not_relocated_is_traced(traced: list[Any]) -> None:
    def imports(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        import math

        return q_idx >= math.floor(1.5) * kv_idx

    for n in range(2):
        longer = list(range(n, n + 99))

        def from_numpy(b: Any, h: Any, q_idx: Any, kv_idx: Any, array: Any = np.array([n, n + 1])) -> Any:  # noqa: B008
            return kv_idx < array[1]

        def from_a_long_list(b: Any, h: Any, q_idx: Any, kv_idx: Any, numbers: list[int] = longer) -> Any:
            return kv_idx < numbers[98]

        functions: list[Callable[..., Any]] = [imports, from_numpy, from_a_long_list]
        for function in functions:
            check_trace(mask_mod(function))
    assert len(traced) == 6


def test_the_default_dtype_decides_constants(traced: list[Any]) -> None:
    def make() -> Mod:
        return score_mod(lambda score, b, h, q_idx, kv_idx: score * torch.tensor([0.1, 0.2])[h])

    make().trace()
    torch.set_default_dtype(torch.float64)
    try:
        assert make().trace().graph.captures[0].storage.value == "fp64"
    finally:
        torch.set_default_dtype(torch.float32)
    assert make().trace().graph.captures[0].storage.value == "fp32"


def test_nothing_that_was_captured_is_kept(traced: list[Any]) -> None:
    layer, bias = _Layer(), torch.randn(9)
    gone: list[weakref.ref[Any]] = [
        weakref.ref(layer),
        weakref.ref(layer.bias),
        weakref.ref(bias),
        weakref.ref(layer.plan),
    ]
    layer.mod().trace()
    _biased(bias, 2).trace()
    assert len(traces._templates) == 2
    traced.clear()
    del layer, bias
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    check_trace(_Layer().mod())


@pytest.mark.parametrize(
    "form",
    [
        *("closure", "default", "keyword", "inner", "object", "mask", "block mask"),
        *("partial", "keyword of a partial", "callable", "method"),
    ],
)
def test_a_function_that_is_used_once_is_gone_without_a_collection(form: str) -> None:
    """What it captured may be large, and have all of a model's activations behind it."""
    q = torch.randn(1, 2, 9, 4, requires_grad=True)

    def step() -> weakref.ref[torch.Tensor]:
        bias, layer = torch.randn(9), _Layer()
        layer.bias = torch.nn.Parameter(bias)
        biased = Biased(bias)

        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + bias[kv_idx]

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return bias[kv_idx] > -9

        given: dict[str, dict[str, Any]] = {
            "closure": {"score_mod": score},
            "default": {"score_mod": lambda s, b, h, q_idx, kv_idx, bias=bias: s + bias[kv_idx]},
            "keyword": {"score_mod": lambda s, b, h, q_idx, kv_idx, *, bias=bias: s + bias[kv_idx]},
            "partial": {"score_mod": partial(add, bias)},
            "keyword of a partial": {"score_mod": partial(add_named, bias=bias)},
            "callable": {"score_mod": biased},
            "method": {"score_mod": biased.twice},
            "inner": {"score_mod": lambda s, b, h, q_idx, kv_idx: 2 * score(s, b, h, q_idx, kv_idx)},
            "object": {"score_mod": lambda s, b, h, q_idx, kv_idx: s + layer.bias[kv_idx]},
            "mask": {"mask_mod": mask_mod(mask) & masks.causal},
            "block mask": {"mask_mod": None},
        }
        if form == "block mask":
            given[form] = {"block_mask": flexc.create_block_mask(mask, None, None, 9, 9, device="cpu")}
        flexc.attention(q, q, q, **given[form]).sum().backward()
        return weakref.ref(layer.bias if form == "object" else bias)

    gc.collect()
    gc.disable()
    try:
        assert [step()() for _ in range(2)] == [None, None]
    finally:
        gc.enable()
