"""The bounds of a value over a box of inputs."""

from __future__ import annotations

from typing import NamedTuple

from flexc.ir.arrays import Array


class Bounds(NamedTuple):
    """Inclusive least and greatest value; of a boolean, whether surely and whether possibly true."""

    lo: Array
    hi: Array
