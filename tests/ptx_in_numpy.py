"""Inline assembly of generated kernels, as far as it is arithmetic of floats, run by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add.f32": np.add,
    "sub.f32": np.subtract,
    "mul.f32": np.multiply,
    "fma.rn.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "ex2.approx.ftz.f32": np.exp2,
    "shl.b32": lambda a, n: (a.view(np.uint32) << np.uint32(n)).view(np.float32),
}


def arithmetic(text: str, arguments: Sequence[Any], pack: int) -> np.ndarray[Any, Any]:
    """PTX of floats; elements that are neighbours in memory share its instructions, `pack` of them."""
    operands = np.broadcast_arrays(*(np.asarray(x, np.float32) for x in arguments))
    parts = [x.reshape(-1, pack) for x in operands]
    known: dict[str, Any] = {
        f"${pack + pack * n + i}": x[:, i] for n, x in enumerate(parts) for i in range(pack)
    }
    for line in text.replace("{", "").replace("}", "").split(";"):
        op, _, names = line.strip().partition(" ")
        if op and op != ".reg":
            target, *sources = (name.strip() for name in names.split(","))
            known[target] = _ARITHMETIC[op](*(known[s] if s in known else _number(s) for s in sources))
    return np.stack([known[f"${i}"] for i in range(pack)], 1).reshape(operands[0].shape)


def _number(text: str) -> Any:
    """A literal of PTX: the bits of a float, or an integer."""
    return np.uint32(int(text[2:], 16)).view(np.float32) if text.startswith("0f") else int(text)
