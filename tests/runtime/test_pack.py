"""Captured numbers as kernels take them."""

from __future__ import annotations

import math

import pytest
import torch

from flexc.codegen.arguments import Argument, Source
from flexc.codegen.design import Design
from flexc.pack import Tensors, pack
from flexc.tensor_maps import is_descriptor
from tests.codegen.generate import generate


@pytest.mark.parametrize(
    ("value", "packed"), [(True, 1), (7, 7), (0.5, 0.5), (-1e300, -math.inf), (math.inf, math.inf)]
)
def test_numbers(value: float, packed: float) -> None:
    q = torch.randn(1, 2, 3, 4)
    tensors = Tensors(q, q, q, q, None, None, None, None)
    (scalar,) = pack([Argument("x", "fp32", Source.SCALAR)], tensors, [value], None, 0.5)[4:5]
    assert scalar == packed
    assert not isinstance(scalar, bool)


@pytest.mark.parametrize("design", list(Design))
def test_values_are_in_the_order_of_the_arguments(design: Design) -> None:
    """Each kind of value where the kernel has it, with everything that a kernel can take."""
    kernel = generate(design=design, dropout=True, has_sinks=True, return_lse=True)
    launcher_adds = (Source.COUNTER,)
    arguments = [a for a in kernel.arguments if not is_descriptor(a) and a.source not in launcher_adds]
    q, k, v, out = (
        torch.randn(shape) for shape in ((3, 8, 5, 128), (3, 2, 7, 128), (3, 2, 7, 128), (3, 8, 5, 128))
    )
    lse, sinks, seed = torch.randn(3, 8, 5), torch.randn(8), torch.tensor(1)
    tensors = Tensors(q, k, v, out, lse, sinks, None, None, seed=seed)
    packed = pack(kernel.arguments, tensors, [], None, 0.5, 0.25)
    named = dict(zip([(a.source, a.dimension) for a in arguments], packed, strict=True))
    addressed = {
        Source.Q: q, Source.K: k, Source.V: v, Source.OUT: out, Source.LSE: lse, Source.SINKS: sinks,
        Source.DROPOUT_SEED: seed,
    }  # fmt: skip
    expected: dict[Source, int | float] = {source: x.data_ptr() for source, x in addressed.items()}
    expected |= {
        Source.Q_HEADS: 8, Source.GROUP: 4, Source.Q_LEN: 5, Source.KV_LEN: 7, Source.SCALE: 0.5,
        Source.DROPPED_BELOW: 2**30, Source.SURVIVORS_WEIGHT: 1 / 0.75,
    }  # fmt: skip
    if design is Design.HOPPER:
        expected[Source.BATCH] = 3
    assert {source: named[source, 0] for source in expected} == expected
    assert named[Source.K_STRIDE, 1] == k.stride(1)
