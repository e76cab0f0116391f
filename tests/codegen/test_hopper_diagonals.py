"""What generated Hopper kernels do between threads: run on the CPU, one number a thread in numpy arrays."""

from __future__ import annotations

import ast
import types
from typing import Any

import numpy as np
import pytest
import torch

from flexc import scores
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import Entry, backward_spec
from flexc.codegen.target import TARGETS
from flexc.resolve import resolve
from tests.codegen.generate import spec_for

KEYS = 64


class _Array(np.ndarray[Any, Any]):
    """A tensor of the language; its layout is of no account here."""

    def permute(self, *order: Any) -> Any:
        return self.transpose(*order)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def _array(x: Any) -> _Array:
    return np.asarray(x).view(_Array)


def _from_lane(x: Any, lane: Any) -> _Array:
    first = np.arange(128) // 32 * 32
    return _array(np.asarray(x)[first + np.asarray(lane) % 32])


LANGUAGE = types.SimpleNamespace(
    static_range=range,
    split=lambda x: (x[..., 0], x[..., 1]),
    join=lambda x, y: _array(np.stack([x, y], -1)),
    arange=lambda first, end, layout=None: _array(np.arange(first, end)),
    zeros=lambda shape, kind, layout=None: _array(np.zeros(shape)),
    where=lambda choice, x, y: _array(np.where(choice, x, y)),
    minimum=np.minimum,
    maximum=np.maximum,
    BlockedLayout=lambda *sizes: None,
    convert_layout=lambda x, layout, assert_trivial: x,
    constexpr=None,
    float32=None,
)


def _functions(block_q: int) -> dict[str, Any]:
    """The functions of the backward of a learned bias, as Python."""
    score = scores.relative_bias(torch.ones(2, 255))
    values = resolve(score, None)[1]
    learned = tuple(n for n, x in enumerate(values) if isinstance(x, torch.Tensor)) if block_q == 64 else ()
    spec = spec_for(None, score, head_dim=64, return_lse=True)
    source = lower_backward(
        backward_spec(spec, values, None, slots=learned), Entry.HOPPER, TARGETS["sm90"]
    ).source
    found: dict[str, Any] = {
        "gl": LANGUAGE,
        "from_lane": _from_lane,
        "threads": lambda never: _array(np.arange(128)),
        "BLOCK_Q": block_q,
        "KEYS": KEYS,
    }
    assert f"BLOCK_Q = gl.constexpr({block_q})" in source
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name not in found:
            node.decorator_list = []
            exec(compile(ast.Module([node], []), "generated", "exec"), found)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_diagonals(seed: int) -> None:
    tile = np.random.default_rng(seed).integers(-100, 100, (KEYS, 64))
    sums, apart = _functions(64)["diagonal_sums"](_array(tile), 0)
    found, expected = np.zeros(256), np.zeros(256)
    for i, some in enumerate(sums):
        np.add.at(found, apart + 32 * (i - 1) + 128, some)
    key, query = np.indices(tile.shape)
    np.add.at(expected, query - key + 128, tile)
    assert (found == expected).all()


@pytest.mark.parametrize("block_q", [64, 128])
def test_values_by_distance_over_a_tile(block_q: int) -> None:
    made = _functions(block_q)
    first, long = 1000, 10**6
    windows = tuple(_array(made["distances"](first, long, long, i, 0)) for i in range(block_q // 32 + 1))
    key, query = np.indices((KEYS, block_q))
    assert (made["over_tile"](windows, None, 0) == first + query - key).all()


def test_no_distance_is_further_than_pairs_are_apart() -> None:
    found = [_functions(64)["distances"](first, 50, 60, i, 0) for first in (-200, 0, 200) for i in range(3)]
    assert np.min(found) == -59
    assert np.max(found) == 49
