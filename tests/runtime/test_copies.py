"""Copied models have mods over their own tensors, however these were captured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flexc

Score = Callable[..., Any]


def _over_self(model: Model) -> Score:
    return lambda s, b, h, q_idx, kv_idx: s * model.weight[h]


def _over_the_parameter(model: Model) -> Score:
    weight = model.weight
    return lambda s, b, h, q_idx, kv_idx: s * weight[h] * math.pi


def _by_default(model: Model) -> Score:
    return lambda s, b, h, q_idx, kv_idx, weight=model.weight: s * weight[h]


def _by_keyword(model: Model) -> Score:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, weight: Any = model.weight) -> Any:
        return s * weight[h]

    return score


def _by_partial(model: Model) -> Score:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, weight: Any) -> Any:
        return s * weight[h]

    return partial(score, weight=model.weight)


def _by_partial_of_a_closure(model: Model) -> Score:
    def score(power: float, s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * model.weight[h] ** power

    return partial(score, 2.0)


def _by_another_function(model: Model) -> Score:
    import math as modules_are_shared

    def factor(h: Any) -> Any:
        return model.weight[h] * modules_are_shared.pi

    return lambda s, b, h, q_idx, kv_idx: s * factor(h)


def _of_the_model(model: Model) -> Score:
    return model.score


class Model(torch.nn.Module):
    def __init__(self, make: Callable[[Model], Score]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2))
        self.register_buffer("last", torch.tensor(5))
        self.scoring = flexc.score_mod(make(self))
        # The last part is no MaskMod of its own.
        self.mask = flexc.masks.causal & (lambda b, h, q_idx, kv_idx: kv_idx <= self.last)

    def score(self, s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * self.weight[h]

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return flexc.attention(q, q, q, score_mod=self.scoring, mask_mod=self.mask)


MAKERS = [
    _over_self,
    _over_the_parameter,
    _by_default,
    _by_keyword,
    _by_partial,
    _by_partial_of_a_closure,
    _by_another_function,
    _of_the_model,
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_copied_model_trains_its_own_parameters(make: Callable[[Model], Score]) -> None:
    model, q = Model(make), torch.randn(1, 2, 9, 4)
    expected = model(q)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(q), expected)
    with torch.no_grad():
        model.weight.zero_()
        model.get_buffer("last").zero_()
    assert torch.equal(twin(q), expected)
    twin(q).pow(2).sum().backward()
    assert model.weight.grad is None
    assert twin.weight.grad is not None
    assert repr(copy.deepcopy(twin).scoring) == repr(model.scoring)


def test_an_ensemble_of_copies() -> None:
    """As PyTorch's own recipe has it: a copy on no device, called with stacked parameters."""
    models, q = [Model(_over_self) for _ in range(3)], torch.randn(1, 2, 9, 4)
    base = copy.deepcopy(models[0]).to("meta")
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters: Any, buffers: Any) -> Any:
        return torch.func.functional_call(base, (parameters, buffers), (q,))

    found = torch.func.vmap(call)(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([model(q) for model in models]))


def test_functions_that_share_a_variable_share_its_copy() -> None:
    table = torch.ones(3)

    def read(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[h] > 0

    def again(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return again is not None and read(b, h, q_idx, kv_idx) and table[h] > 0

    def early(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return later[h] > 0

    mods: Any = copy.deepcopy([flexc.mask_mod(f) for f in (again, read, early)])
    one, other, unset = (mod.function for mod in mods)
    cells = dict(zip(one.__code__.co_freevars, one.__closure__, strict=True))
    assert cells["again"].cell_contents is one
    assert cells["read"].cell_contents is other
    assert cells["table"] is other.__closure__[0]
    assert cells["table"].cell_contents is not table
    with pytest.raises(ValueError, match="empty"):
        _ = unset.__closure__[0].cell_contents
    later = table
    assert copy.deepcopy(flexc.masks.causal) is flexc.masks.causal
