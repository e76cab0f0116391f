"""torch.compile around flexc: calls run between its graphs, whatever the mods are made of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flexc


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    return 2 * flexc.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < width)


def _blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    mask = flexc.create_block_mask(
        lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < width, None, None, q.shape[2], k.shape[2], "cpu"
    )
    out = flexc.flex_attention(q, k, v, block_mask=mask)
    assert isinstance(out, torch.Tensor)
    return 2 * out


@pytest.mark.parametrize("function", [_window, _blocks])
def test_mods_made_in_a_compiled_function(function: object) -> None:
    assert callable(function)
    compiled = torch.compile(function, backend="eager")
    for width, length in ((3, 20), (4, 20), (4, 33)):
        q, k, v = torch.randn(3, 1, 2, length, 8)
        assert torch.equal(compiled(q, k, v, width), function(q, k, v, width))


def test_a_compiled_block_mask() -> None:
    compiled = torch.compile(flexc.create_block_mask, backend="eager")
    mask = compiled(flexc.masks.causal, None, None, 300, 300, device="cpu")
    assert mask.shape == (1, 1, 300, 300)


def test_one_graph_is_refused_with_the_reason() -> None:
    compiled = torch.compile(_window, backend="eager", fullgraph=True)
    q = torch.randn(1, 2, 20, 8)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="flexc is no operator"):
        compiled(q, q, q, 3)
