"""Runs a generated kernel with Triton's interpreter: on the CPU, slowly, program by program, for tests."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flexc.call import AttentionCall, Result
from flexc.codegen.arguments import Argument
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.pipeline import lower
from flexc.codegen.target import TARGETS
from flexc.frontend.value import STORAGES
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.stretches import stretches
from flexc.map_cache import effective_block_map
from flexc.pack import Tensors, pack, seed_on

# The interpreter has no inline assembly, and multiplies fp32 as numpy does; sm80's plan is the portable one.
OPTIONS = (("fast_tanh", False), ("precision", "ieee"))


def run(call: AttentionCall, spec: AttentionSpec) -> Result:
    """Compute a call on CPU tensors as the kernel would."""
    generated, entry = _entry(spec, (*OPTIONS, *call.options))
    q, v = call.q, call.v
    batch, heads, q_len, _ = q.shape
    out = torch.empty((batch, heads, q_len, v.shape[3]), dtype=q.dtype) if call.out is None else call.out
    lse = torch.empty((batch, heads, q_len)) if call.return_lse else None
    plan = generated.plan
    apart = heads if plan.packed_heads == 1 else call.k.shape[1]
    programs = -(-q_len // plan.head_rows) * apart * batch
    if programs == 0:
        return out, lse
    block_map = None
    if spec.blocks is Blocks.MAP:
        block_map = effective_block_map(call, max(plan.head_rows, 16), plan.tiles.block_kv)
    offsets = walk = None
    if block_map is not None:
        offsets, walk = (torch.from_numpy(x) for x in stretches(block_map))
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    seed = seed_on(call.dropout_seed, q.device) if call.dropout_p else None
    tensors = Tensors(q, call.k, v, out, lse, sinks, offsets, walk, seed)
    entry[(programs,)](
        *pack(
            generated.arguments,
            tensors,
            call.values,
            block_map,
            call.scale,
            call.dropout_p,
            address=lambda x: x,
        )
    )
    return out, lse


@lru_cache(maxsize=256)
def _entry(spec: AttentionSpec, options: tuple[tuple[str, object], ...]) -> tuple[GeneratedKernel, Any]:
    generated = lower(spec, TARGETS["sm80"], options=dict(options))
    return generated, entry_of(generated)


def entry_of(generated: GeneratedKernel) -> Any:
    """The kernel's function, interpreted."""
    from flexc.compiler import import_file

    folder = Path(tempfile.mkdtemp(prefix="flexc-interpret-"))
    path = folder / "kernel.py"
    path.write_text(generated.source)
    return getattr(import_file(path), generated.entry)


_DTYPES = {f"*{storage.value}": dtype for dtype, storage in STORAGES.items()} | {"*i1": torch.int8}


def at_address(argument: Argument, value: int | float) -> int | float | torch.Tensor:
    """The value of an argument; a tensor where it is an address, as the interpreter wants it."""
    if not argument.type.startswith("*"):
        return value
    dtype = _DTYPES[argument.type]
    memory = (ctypes.c_char * dtype.itemsize).from_address(int(value))
    return torch.frombuffer(memory, dtype=dtype, count=1)


def with_addresses(values: Sequence[int | float | None], addresses: tuple[int, ...]) -> list[int | float]:
    """The values of a launch, with the addresses where they have None."""
    rest = iter(addresses)
    return [next(rest) if value is None else value for value in values]
