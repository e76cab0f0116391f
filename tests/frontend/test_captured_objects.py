"""Captured objects, classes and modules: every place that is read is watched."""

from __future__ import annotations

import copy
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flexc.frontend.trace import trace
from flexc.ir.graph import ModKind
from flexc.mods import as_mask_mod, mask_mod
from tests.frontend.captured import Config, Model, check, text, window_mask


def test_attributes_of_objects() -> None:
    model = Model()
    mod = as_mask_mod(model.mask)
    assert as_mask_mod(model.mask) is mod, "bound methods are made anew at each access"
    made = check(model.mask, mod.trace())
    assert mod.trace() is made
    model.config.window = 1
    again = check(model.mask, mod.trace())
    assert again.graph is made.graph
    model.config.names["first"] = 5
    assert check(model.mask, mod.trace()).graph is made.graph
    model.limit = torch.tensor([5, 12])
    assert check(model.mask, mod.trace()).graph is made.graph
    model.config = Config(2, torch.tensor(1), {"first": 1})
    check(model.mask, mod.trace())


REACH = 3


class Base:
    LIMIT = 9

    def near(self, q_idx, kv_idx):
        return q_idx - kv_idx < REACH


class Derived(Base):
    def near(self, q_idx, kv_idx):
        return super().near(q_idx, kv_idx) & (kv_idx < self.__class__.LIMIT)

    def __call__(self, b, h, q_idx, kv_idx):
        assert isinstance(self, Base)
        return self.near(q_idx, kv_idx)


def test_methods_after_super_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = mask_mod(Derived())
    made = check(mod.function, mod.trace())
    assert mod.trace() is made
    monkeypatch.setitem(globals(), "REACH", 6)
    check(mod.function, mod.trace())
    monkeypatch.setattr(Base, "LIMIT", 4)
    check(mod.function, mod.trace())


def test_instances_made_in_a_mod_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(b, h, q_idx, kv_idx):
        return Derived().near(q_idx, kv_idx)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    monkeypatch.setitem(globals(), "REACH", 6)
    check(mask, mod.trace())
    monkeypatch.setattr(Base, "LIMIT", 4)
    check(mask, mod.trace())


def test_imports_in_a_mod_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = types.ModuleType("flexc_test_settings")
    settings.size = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flexc_test_settings", settings)

    def mask(b, h, q_idx, kv_idx):

        from flexc_test_settings import size  # type: ignore[import-not-found]

        return q_idx - kv_idx < size * math.floor(1.5)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made
    settings.size = 6  # type: ignore[attr-defined]
    assert check(mask, mod.trace()).values == (6,)


def test_numbers_on_tensors_are_watched() -> None:
    table = torch.rand(13)
    table.window = 3  # type: ignore[attr-defined]

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < vars(table)["window"]) & (table[kv_idx] > 0.2)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made
    table.window = 6  # type: ignore[attr-defined]
    check(mask, mod.trace())
    table = torch.rand(13)
    table.window = 2  # type: ignore[attr-defined]
    check(mask, mod.trace())


def test_decorated_functions() -> None:
    size = 4

    @torch.no_grad()
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    made = check(mask)
    assert made.values == (4,)
    compiled = torch.compile(window_mask(5), backend="eager")
    assert trace(compiled, ModKind.MASK).values == (5,)


def test_under_other_modes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    table, function = torch.rand(13), window_mask(3)
    biased = lambda b, h, q_idx, kv_idx: (table[kv_idx] * 2 > table.sum()) & (q_idx < table.shape[0])  # noqa: E731
    plain = text(trace(function, ModKind.MASK)), text(trace(biased, ModKind.MASK))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    contexts: list[Any] = [torch.inference_mode(), torch.no_grad(), torch.device("meta"), fake]
    for context in contexts:
        with context:
            assert (text(trace(function, ModKind.MASK)), text(trace(biased, ModKind.MASK))) == plain

    def traced_inside(x: torch.Tensor) -> torch.Tensor:
        assert text(trace(function, ModKind.MASK)) == plain[0]
        return x

    torch.vmap(traced_inside)(torch.rand(2))


def test_copies_of_an_object_have_their_own_mod() -> None:
    first = Window(3, torch.rand(2))
    as_mask_mod(first).trace()
    second = copy.copy(first)
    second.size = 5
    assert as_mask_mod(second).function is second
    assert as_mask_mod(second).trace().values == (5,)
    assert as_mask_mod(first).trace().values == (3,)


@dataclass
class Window:
    size: int
    unused: torch.Tensor

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.size


def test_changing_an_object_is_an_error() -> None:
    model = Model()

    def mask(b, h, q_idx, kv_idx):
        model.config.window = 4
        return q_idx >= kv_idx

    with pytest.raises(Exception, match="changes an object"):
        trace(mask, ModKind.MASK)
