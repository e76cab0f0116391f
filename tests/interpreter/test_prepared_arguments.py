"""Arguments of repeated calls that equal others and mean something else, or that no call can have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flexc
from flexc import gpu, replay
from flexc.errors import UnknownOption
from tests.interpreter import faked_gpu


@pytest.fixture(autouse=True)
def _faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replay._prepared.clear()
    faked_gpu.install(monkeypatch)
    yield
    replay._prepared.clear()


@pytest.mark.parametrize("differentiates", [False, True])
def test_a_scale_that_is_a_tensor_is_read_at_each_call(differentiates: bool) -> None:
    q, scale = torch.randn(1, 2, 20, 16, requires_grad=differentiates), torch.tensor(0.25)
    given: Any = {"scale": scale}
    for number in (0.25, 0.5, 2.0):
        scale.fill_(number)
        found = flexc.attention(q, q, q, backend="triton", **given)
        torch.testing.assert_close(found, flexc.attention(q, q, q, backend="cpu", scale=number))


def test_a_number_that_is_0_on_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals the other one, and what is divided by it has another sign."""
    q, numbers = torch.randn(1, 2, 20, 16), []
    launch = gpu._launch

    def noted(call: Any, backend: str) -> Any:
        numbers.append(str(call.values[0]))
        return launch(call, backend)

    monkeypatch.setattr(gpu, "_launch", noted)
    for zero in (0.0, 0.0, -0.0, -0.0, 0.0):
        flexc.attention(q, q, q, backend="triton", score_mod=lambda s, b, h, q_idx, kv_idx, n=zero: s + n)
    assert numbers == ["0.0", "-0.0"]
    for nan in (float("nan"), float("nan")):
        flexc.attention(q, q, q, backend="triton", score_mod=lambda s, b, h, q_idx, kv_idx, n=nan: s + n)
    assert numbers == ["0.0", "-0.0", "nan"]


@pytest.mark.parametrize("options", [{"block_q": [16]}, {"block_q": {}}, [16], "block_q", {1: 2}])
def test_options_that_are_none(options: Any) -> None:
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(UnknownOption):
        flexc.attention(q, q, q, backend="triton", options=options)
