"""What of an attention call is no tensor: a text that names it in a graph of PyTorch's, in any process.

The operator `flexc::attention` takes tensors, numbers, and one such text. It holds the graphs of the mods, so
another process that loads an exported program can compute it. The same code gives the same text, whatever
tensors its closures hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexc.call import Mods
from flexc.errors import UnsupportedCapture
from flexc.frontend.value import Value
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.types import SHORT_NUMBER, Storage
from flexc.ir.wire import from_wire, to_wire
from flexc.lru import LRU


@dataclass(frozen=True, slots=True)
class MapShape:
    """A block map without its arrays and lengths: block sizes, and whether it tells batches and heads apart.

    `form` says what its tensors are: the offsets and "runs" of a map on the host, the offsets and "stretches"
    of one on a device, or PyTorch's "lists" `kv_num_blocks`, `kv_indices`, and those of full blocks.
    """

    block_q: int
    block_kv: int
    by_batch: bool = False
    by_head: bool = False
    form: str = "runs"


@dataclass(frozen=True, slots=True)
class Statement:
    """The static part of a call."""

    score: Expr | None
    mask: Expr | None
    captures: tuple[Capture, ...]
    backend: str = "auto"
    returns_lse: bool = True
    options: tuple[tuple[str, object], ...] = ()
    dropout_p: float = 0.0
    deterministic: bool = False
    blocks: MapShape | None = None


_texts: LRU[Statement, str] = LRU(1024)
_read: LRU[str, tuple[Statement, Mods]] = LRU(1024)


def text_of(statement: Statement, mods: Mods | None = None) -> str:
    """The text of a statement. In this process it is read back with `mods`, which know their sources."""
    text = _texts.get(statement)
    if text is None:
        blocks = statement.blocks
        facts = {
            "backend": statement.backend,
            "returns_lse": statement.returns_lse,
            "options": [[name, value] for name, value in statement.options],
            "dropout_p": float(statement.dropout_p).hex(),
            "deterministic": statement.deterministic,
            "blocks": None
            if blocks is None
            else [blocks.block_q, blocks.block_kv, blocks.by_batch, blocks.by_head, blocks.form],
        }
        text = to_wire((statement.score, statement.mask), statement.captures, facts)
        _texts.put(statement, text)
    if _read.get(text) is None:
        _read.put(text, (statement, _mods(statement) if mods is None else mods))
    return text


def read(text: str) -> tuple[Statement, Mods]:
    """The statement of a text, and its mods: the same objects for the same text as long as it is in use."""
    found = _read.get(text)
    if found is None:
        (score, mask), captures, facts = from_wire(text)
        blocks = facts["blocks"]
        statement = Statement(
            score=score,
            mask=mask,
            captures=captures,
            backend=facts["backend"],
            returns_lse=facts["returns_lse"],
            options=tuple((name, value) for name, value in facts["options"]),
            dropout_p=float.fromhex(facts["dropout_p"]),
            deterministic=facts["deterministic"],
            blocks=None if blocks is None else MapShape(*blocks),
        )
        found = (statement, _mods(statement))
        _read.put(text, found)
    return found


def _mods(statement: Statement) -> Mods:
    return Mods(statement.score, statement.mask, statement.captures)


def split_values(
    captures: Sequence[Capture], values: Sequence[Value]
) -> tuple[list[torch.Tensor], list[int], list[float]]:
    """Captured values by slot as tensors, integers (booleans too) and floats; symbolic ones stay so."""
    tensors: list[torch.Tensor] = []
    integers: list[int] = []
    floats: list[float] = []
    for capture, value in zip(captures, values, strict=True):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif capture.storage is Storage.FP32:
            floats.append(_float(value))
        else:
            integers.append(value)  # type: ignore[arg-type]
    return tensors, integers, floats


def _float(value: Any) -> Any:
    return value if isinstance(value, torch.SymFloat) else float(value)


def join_values(
    captures: Sequence[Capture],
    tensors: Sequence[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
) -> tuple[Value, ...]:
    """The captured values by slot.

    Raises:
        UnsupportedCapture: an integer that was compiled as one of 32 bits has outgrown them.
    """
    next_tensor, next_integer, next_float = iter(tensors), iter(integers), iter(floats)
    values: list[Value] = []
    for capture in captures:
        if capture.is_tensor:
            values.append(next(next_tensor))
        elif capture.storage is Storage.FP32:
            values.append(next(next_float))
        else:
            values.append(_integer(capture, next(next_integer)))
    return tuple(values)


def _integer(capture: Capture, value: int) -> int | bool:
    if capture.storage is Storage.BOOL:
        return bool(value)
    if capture.storage is Storage.I32 and abs(value) >= SHORT_NUMBER:
        raise UnsupportedCapture(
            f"the captured number `{capture.name}` is {value}, and was compiled as one of 32 bits",
            hint="capture it as a 0-dim int64 tensor",
        )
    return value
