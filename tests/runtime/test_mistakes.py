"""Wrong arguments of the calls: a FlexcError that says what was passed, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flexc
from flexc import errors, masks, scores

GOOD: dict[str, Any] = {name: torch.ones(1, 4, 8, 16) for name in "qkv"}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"q": None}, errors.UnsupportedDtype, "q must be a torch.Tensor, not NoneType"),
        ({"k": np.ones((1, 4, 8, 16))}, errors.UnsupportedDtype, "torch.as_tensor"),
        ({"v": [1.0]}, errors.UnsupportedDtype, "v must be a torch.Tensor, not list"),
        ({"q": torch.ones(1, 4, 8, 16).to_sparse()}, errors.UnsupportedFeature, "q has the layout"),
        ({n: x.to("meta") for n, x in GOOD.items()}, errors.UnsupportedFeature, "no backend for meta"),
        ({"v": torch.ones(1, 4, 8, 513)}, errors.UnsupportedHeadDim, "v has head_dim 513"),
        ({"sinks": [0.0] * 4}, errors.UnsupportedDtype, "sinks must be a torch.Tensor"),
        ({"out": [0.0]}, errors.UnsupportedDtype, "out must be a torch.Tensor"),
        ({"scale": "large"}, errors.UnknownOption, "scale is 'large'"),
        ({"scale": torch.ones(2)}, errors.UnknownOption, "scale is tensor"),
        ({"options": ["block_q"]}, errors.UnknownOption, "options are"),
        ({"options": {1: 2, "block_q": 64}}, errors.UnknownOption, "a dict of names"),
    ],
)
def test_attention(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        flexc.attention(**(GOOD | changes))


def test_a_scale_may_be_a_tensor_of_one_number() -> None:
    ours = flexc.attention(**(GOOD | {"scale": torch.tensor(0.25)}))
    assert torch.equal(ours, flexc.attention(**(GOOD | {"scale": 0.25})))


@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ({"score_mod": scores.alibi(torch.ones(2))}, r"'slopes' has shape \(2,\).* at h .* q has 4 heads"),
        ({"mask_mod": masks.document(torch.zeros(0, 8))}, r"'doc_ids' .* at b in dimension 0, .* 1 batches"),
    ],
)
def test_a_captured_tensor_with_too_few_batches_or_heads(mods: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ShapeMismatch, match=message):
        flexc.attention(**(GOOD | mods))


def test_flex_attention_of_no_tensors() -> None:
    with pytest.raises(errors.UnsupportedDtype, match="query must be"):
        flexc.flex_attention(None, GOOD["k"], GOOD["v"])  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64.0, "64", 0, 513])
def test_head_dims_of_compile(head_dim: Any) -> None:
    with pytest.raises(errors.UnsupportedHeadDim, match="head_dim is"):
        flexc.compile(head_dim=head_dim)


def test_options_of_compile() -> None:
    with pytest.raises(errors.UnknownOption, match="options are"):
        flexc.compile(head_dim=64, options=["block_q"])  # type: ignore[arg-type]


def test_saving_a_kernel_deletes_nothing_else(tmp_path: Path) -> None:
    kernel = flexc.compile(mask_mod=masks.causal, head_dim=64)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    for taken in (notes, notes / "thesis.txt"):
        with pytest.raises(errors.KernelFileError, match="holds no kernel"):
            kernel.save(taken)
    assert [path.name for path in tmp_path.rglob("*")] == ["notes", "thesis.txt"]
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # into an empty folder, and over an earlier kernel
        kernel.save(tmp_path / "empty")
    assert flexc.load(tmp_path / "empty").source == kernel.source
