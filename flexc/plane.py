"""One plane of a mask: the pairs (q_idx, kv_idx) that may attend for one batch and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexc.errors import ShapeMismatch
from flexc.frontend.value import Value
from flexc.ir import build
from flexc.ir.blockmap import BlockMap
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture, ModSource
from flexc.ir.ops import Input
from flexc.ir.simplify import simplify
from flexc.ir.substitute import substitute
from flexc.map_cache import block_map_for
from flexc.resolve import resolve

Grid = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """A mask at fixed `b` and `h`.

    `graph` is the traced and simplified mask, `root` the same after b and h were fixed; `captures` and
    `values` are what both read, by slot.
    """

    source: ModSource
    graph: Expr
    root: Expr
    captures: tuple[Capture, ...]
    values: tuple[Value, ...]
    q_len: int
    kv_len: int

    def grid(self) -> Grid:
        """All pairs: bool (q_len, kv_len), evaluated one by one on the CPU."""
        inputs = {
            Input.Q_IDX: torch.arange(self.q_len, dtype=torch.int32)[:, None],
            Input.KV_IDX: torch.arange(self.kv_len, dtype=torch.int32)[None, :],
            Input.Q_LEN: self.q_len,
            Input.KV_LEN: self.kv_len,
        }
        values = [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in self.values]
        allowed = evaluate(self.root, Env(inputs=inputs, values=values, xp=torch, float_dtype=torch.float32))
        return np.broadcast_to(np.asarray(allowed, dtype=np.bool_), (self.q_len, self.kv_len))

    def block_map(self, block_q: int, block_kv: int) -> BlockMap:
        """The tiles of this plane; evaluates the mask only in tiles that no analysis decides."""
        return block_map_for(
            self.root,
            self.values,
            q_len=self.q_len,
            kv_len=self.kv_len,
            batch=1,
            heads=1,
            block_q=block_q,
            block_kv=block_kv,
        )


def plane(mask: Callable[..., Any], q_len: int, kv_len: int, *, b: int = 0, h: int = 0) -> Plane:
    """Traces `mask` and fixes its batch and head.

    Raises:
        TraceError: the mask can't be traced.
        ShapeMismatch: a length, `b` or `h` is negative.
    """
    for name, value in (("Q_LEN", q_len), ("KV_LEN", kv_len), ("b", b), ("h", h)):
        if value < 0:
            raise ShapeMismatch(f"{name} is {value}", hint=f"{name} counts from 0")
    mods, values, _ = resolve(None, mask)
    graph = build.TRUE if mods.mask is None else mods.mask
    fixed = {Input.B: build.const(b), Input.H: build.const(h)}
    return Plane(
        source=mods.sources[0],
        graph=graph,
        root=simplify(substitute(graph, fixed)),
        captures=mods.captures,
        values=values,
        q_len=q_len,
        kv_len=kv_len,
    )
