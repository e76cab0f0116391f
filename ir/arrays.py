"""The few array operations that numpy and torch spell differently."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

# A numpy array or scalar, or a torch tensor: ir never imports torch, so no narrower type has a name here.
Array: TypeAlias = Any
# numpy or torch, the module itself.
Namespace: TypeAlias = Any


def bool_type(xp: Namespace) -> Any:
    """The boolean dtype (numpy before 2.0 has no `numpy.bool`)."""
    return np.bool_ if xp is np else xp.bool


def convert(xp: Namespace, x: Array, dtype: Any) -> Array:
    """`x` as an array of `dtype`, without a copy where it is one."""
    return np.asarray(x).astype(dtype, copy=False) if xp is np else x.to(dtype)


def arrays_of(x: Array) -> Arrays:
    """The library and device of an array."""
    if isinstance(x, np.ndarray | np.generic):
        return Arrays(np)
    return Arrays(sys.modules[type(x).__module__.partition(".")[0]], x.device)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Makes and reorders arrays of one library, on one device (None: the CPU)."""

    xp: Namespace
    device: Any = None

    def _where(self) -> dict[str, Any]:
        return {} if self.xp is np else {"device": self.device}

    def arange(self, length: int) -> Array:
        """0 to `length - 1`, 64-bit."""
        return self.xp.arange(length, dtype=self.xp.int64, **self._where())

    def asarray(self, values: Sequence[int]) -> Array:
        """The integers as a 64-bit array."""
        if self.xp is np:
            return np.asarray(values, dtype=np.int64)
        return self.xp.tensor(list(values), dtype=self.xp.int64, device=self.device)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros."""
        return self.xp.zeros(shape, dtype=dtype, **self._where())

    def concat(self, parts: Sequence[Array]) -> Array:
        """The parts one after another along the first dimension; an empty 64-bit array of none."""
        if not parts:
            return self.arange(0)
        return parts[0] if len(parts) == 1 else self.xp.concatenate(tuple(parts))

    def positions(self, flags: Array) -> Array:
        """Where the flattened flags are true, ascending."""
        if self.xp is np:
            return np.flatnonzero(flags)
        return self.xp.nonzero(flags.reshape(-1)).reshape(-1)

    def repeat(self, x: Array, counts: Array) -> Array:
        """Each element `counts` times: one number for all, or one an element."""
        return np.repeat(x, counts) if self.xp is np else self.xp.repeat_interleave(x, counts)

    def order(self, keys: Array) -> Array:
        """The permutation that sorts the keys; equal keys keep their order."""
        return np.argsort(keys, kind="stable") if self.xp is np else self.xp.argsort(keys, stable=True)

    def running_sum(self, x: Array) -> Array:
        """Sums of everything up to each element."""
        return self.xp.cumsum(x, 0)

    def counts(self, labels: Array, length: int) -> Array:
        """How often each of 0 to `length - 1` occurs."""
        return self.xp.bincount(labels, minlength=length)
