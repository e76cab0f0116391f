"""The families of kernels that compute the same: one for every GPU, and those made for one generation."""

from __future__ import annotations

from enum import Enum


class Design(Enum):
    """Which template a kernel comes from."""

    PORTABLE = "portable"
    HOPPER = "hopper"
