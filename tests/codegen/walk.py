"""Which tiles a generated kernel visits: its own statements, run in Python with the arithmetic taken out.

The kernel's function is cut to what its loops depend on, the body of its inner loop becomes a record of the
tile, and `tl` is torch on the CPU. So what runs is the text that a GPU gets.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from flexc.codegen.arguments import Argument, Source
from flexc.codegen.module import GeneratedKernel
from flexc.frontend.value import Value

_NUMBERS = {
    "q_tile", "k_tile", "v_tile", "q", "k", "v", "acc", "row_max", "row_sum", "to_log2", "sink",
    "score_scale", "dk", "dv", "dout", "dout_tile", "row_at", "padded_len", "strange",
}  # fmt: skip


@dataclass(frozen=True)
class Visit:
    """One step of a kernel: where the tile begins that it walks to, and whether the mask is applied to it."""

    start: int
    masked: bool


@dataclass(frozen=True)
class _Pointer:
    """An address: elements of a flat tensor."""

    flat: torch.Tensor
    offset: torch.Tensor

    def __add__(self, elements: Any) -> _Pointer:
        return _Pointer(self.flat, self.offset + elements)


def _load(at: _Pointer, mask: Any = True, other: int = 0) -> torch.Tensor:
    inside = torch.as_tensor(mask).expand_as(at.offset) if at.offset.dim() else torch.as_tensor(mask)
    safe = torch.where(inside, at.offset, 0)
    assert ((safe >= 0) & (safe < len(at.flat))).all(), "a load out of range"
    return torch.where(inside, at.flat[safe], torch.tensor(other, dtype=at.flat.dtype))


def _pair(function: Any) -> Any:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


_TL = SimpleNamespace(
    int1=torch.bool,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    minimum=_pair(torch.minimum),
    maximum=_pair(torch.maximum),
    where=lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)),
    min=torch.min,
    max=torch.max,
    abs=torch.abs,
    cdiv=lambda a, b: (a + b - 1) // b,
    arange=torch.arange,
    load=_load,
    program_id=None,
)


def visits(
    kernel: GeneratedKernel,
    values: Sequence[Value],
    *,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    by_keys: bool = False,
) -> dict[tuple[int, int, int], list[Visit]]:
    """The steps of every program, by (b, h, where the tile begins that it keeps): of queries, or of keys."""
    kept, walked = ("kv", "q") if by_keys else ("q", "kv")
    code = compile(_cut(kernel, f"{walked}_start"), "kernel", "exec")
    found = {}
    tiles = kernel.plan.tiles
    count = -(-kv_len // tiles.block_kv) if by_keys else -(-q_len // tiles.block_q)
    for pid in range(count * batch * heads):
        steps: list[Visit] = []
        scope = _scope(kernel, values, q_len, kv_len, heads)
        scope["tl"] = SimpleNamespace(**{**vars(_TL), "program_id": lambda axis, pid=pid: torch.tensor(pid)})
        scope["record"] = lambda start, masked, steps=steps: steps.append(Visit(start, bool(masked)))
        exec(code, scope)
        found[int(scope["b"]), int(scope["h"]), int(scope[f"{kept}_start"])] = steps
    return found


def _cut(kernel: GeneratedKernel, start: str) -> ast.Module:
    """The statements of the entry up to the end of its loops over `start`, for one program."""
    functions = {n.name: n for n in ast.parse(kernel.source).body if isinstance(n, ast.FunctionDef)}
    kept: list[ast.stmt] = []
    for statement in functions[kernel.entry].body[1:]:
        if isinstance(statement, ast.If):  # NaN came out: not here
            break
        if not _is_arithmetic(statement):
            kept.append(_Record(start).visit(statement))
    return ast.fix_missing_locations(ast.Module(kept, []))


def _is_arithmetic(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.target, ast.Name) and statement.target.id in _NUMBERS
    return isinstance(statement, ast.Assign) and _target(statement) in _NUMBERS


def _target(statement: ast.Assign) -> str:
    (target,) = statement.targets
    assert isinstance(target, ast.Name)
    return target.id


class _Record(ast.NodeTransformer):
    """Replaces the body of a loop over `start` by a call of `record`."""

    def __init__(self, start: str) -> None:
        self.start = start

    def visit_For(self, node: ast.For) -> ast.For:
        assert isinstance(node.target, ast.Name)
        if node.target.id != self.start:
            node.body = [s for s in node.body if not _is_arithmetic(s)]
            self.generic_visit(node)
            return node
        (test,) = [ast.unparse(s.test) for s in node.body if isinstance(s, ast.If)]
        node.body = ast.parse(f"record({self.start}, {test})").body
        return node


def _scope(
    kernel: GeneratedKernel, values: Sequence[Value], q_len: int, kv_len: int, heads: int
) -> dict[str, Any]:
    tiles = kernel.plan.tiles
    scope: dict[str, Any] = {
        "BLOCK_Q": tiles.block_q,
        "BLOCK_KV": tiles.block_kv,
        "PADDED_DIM": 16,
        "PADDED_DIM_V": 16,
        "q_len": torch.tensor(q_len, dtype=torch.int32),
        "kv_len": torch.tensor(kv_len, dtype=torch.int32),
        "q_heads": heads,
        "group": 1,
        "heads_per_program": 1,
        "floor_div": lambda a, b: torch.as_tensor(a) // b,
        "floor_mod": lambda a, b: torch.as_tensor(a) % b,
        "range": lambda *bounds: range(*(int(x) for x in bounds)),
    }
    for argument in kernel.arguments:
        if argument.source in (
            Source.CAPTURE, Source.CAPTURE_STRIDE, Source.CAPTURE_SIZE, Source.SCALAR
        ):  # fmt: skip
            scope[argument.name] = _argument(argument, values[argument.slot])
    return scope


def _argument(argument: Argument, value: Value) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value)
    if argument.source is Source.CAPTURE_STRIDE:
        return value.stride(argument.dimension)
    if argument.source is Source.CAPTURE_SIZE:
        return value.shape[argument.dimension]
    flat = value.contiguous().flatten()
    return _Pointer(flat.to(torch.int8) if flat.dtype is torch.bool else flat, torch.tensor(0))
