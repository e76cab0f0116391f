"""Exponentials of the softmax on the CPU, none of which is a subnormal number.

A CPU takes about twenty times as long for a subnormal result, and for the exponential of -inf, and each
product that reads a subnormal is as slow. Beside the 1 of its row's maximum such a weight is nothing.
"""

from __future__ import annotations

import math

import torch


def exp_(x: torch.Tensor) -> torch.Tensor:
    """`x.exp_()` with 0 where that is below about 2.5 times the least normal number. NaN stays NaN.

    x is fp32 or fp64, of any shape; it is overwritten and returned.
    """
    tiny = torch.finfo(x.dtype).tiny
    x.clamp_(min=math.log(2.0 * tiny)).exp_()
    return torch.threshold_(x, 2.5 * tiny, 0.0)
