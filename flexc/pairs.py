"""The operands of a backward in fp32 as pairs of fp16 numbers: where the kernels find them."""

from __future__ import annotations

import torch

from flexc.backward_script import Script
from flexc.codegen.arguments import Source
from flexc.codegen.backward_spec import ROWS_PADDED_TO
from flexc.codegen.tiles import power_of_two_at_least

_PAIRS = (
    (Source.Q, Source.Q_PAIRS, Source.Q_UNIT),
    (Source.K, Source.K_PAIRS, Source.K_UNIT),
    (Source.V, Source.V_PAIRS, Source.V_UNIT),
    (Source.GRAD_OUT, Source.GRAD_OUT_PAIRS, Source.GRAD_OUT_UNIT),
)
"""Operands, and what they become: pairs, and the unit of each row."""


def add_pairs(tensors: dict[Source, torch.Tensor], script: Script) -> int:
    """Add room for the pairs of q, k, v and the gradient of the output; how many rows they have in all.

    Pairs are (B, H, rows, 2 * dims) fp16, a row's coarse parts before its fine ones, units (B, H, rows) fp32.
    Dims are padded to a power of two, rows to a multiple of `ROWS_PADDED_TO`.
    """
    total = 0
    for source, pairs, unit in _PAIRS:
        x = tensors[source]
        batch, heads, length, dim = x.shape
        rows = (batch, heads, -(-length // ROWS_PADDED_TO) * ROWS_PADDED_TO)
        tensors[pairs] = script.scratch((*rows, 2 * power_of_two_at_least(dim)), torch.float16, x.device)
        tensors[unit] = script.scratch(rows, torch.float32, x.device)
        total += batch * heads * rows[2]
    return total
