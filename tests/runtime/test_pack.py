"""Captured numbers as kernels take them."""

from __future__ import annotations

import math

import pytest
import torch

from flexc.codegen.arguments import Argument, Source
from flexc.pack import Tensors, pack


@pytest.mark.parametrize(
    ("value", "packed"), [(True, 1), (7, 7), (0.5, 0.5), (-1e300, -math.inf), (math.inf, math.inf)]
)
def test_numbers(value: float, packed: float) -> None:
    q = torch.randn(1, 2, 3, 4)
    tensors = Tensors(q, q, q, q, None, None, None, None)
    (scalar,) = pack([Argument("x", "fp32", Source.SCALAR)], tensors, [value], None, 0.5)[4:5]
    assert scalar == packed
    assert not isinstance(scalar, bool)
