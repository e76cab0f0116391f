"""The `triton` backend: choose the kernel of a call, find its blocks, pack its arguments, launch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flexc.call import AttentionCall
from flexc.check import check_block_map, check_tensors
from flexc.errors import BackendUnavailable, BlockMaskMismatch, DeviceMismatch, UnsupportedDtype
from flexc.ir.spec import AttentionSpec
from flexc.ir.types import Storage
from flexc.lru import LRU
from flexc.pack import Tensors, pack

if TYPE_CHECKING:
    from flexc.ir.blockmap import BlockMap
    from flexc.kernel import Kernel

Value = torch.Tensor | int | float | bool

STORAGE = {
    torch.bool: Storage.BOOL,
    torch.uint8: Storage.U8,
    torch.int8: Storage.I8,
    torch.int16: Storage.I16,
    torch.int32: Storage.I32,
    torch.int64: Storage.I64,
    torch.float8_e4m3fn: Storage.FP8E4M3,
    torch.float16: Storage.FP16,
    torch.bfloat16: Storage.BF16,
    torch.float32: Storage.FP32,
    torch.float64: Storage.FP64,
}
_MAX_SHORT = 2**23  # see codegen.kernel_form.SHORT
_uploaded: LRU[tuple[int, int], tuple[BlockMap, torch.Tensor, torch.Tensor]] = LRU(256)


def run(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call on its GPU, or with the Triton interpreter when `TRITON_INTERPRET=1` is set."""
    from flexc.build import kernel_for
    from flexc.map_cache import effective_block_map

    if call.q.device.type != "cuda":
        return _interpreted(call)
    spec = spec_of(call)
    kernel = kernel_for(spec, _target(call.q.device.index), call.options, call.mods.sources)
    block_map = None
    if spec.blocks_from_map:
        block_map = effective_block_map(call, kernel.artifact.block_q, kernel.artifact.block_kv)
    return _launch(kernel, call.q, call.k, call.v, call.values, block_map, call.scale, call.sinks, call.out, spec.return_lse)


def _interpreted(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    if os.environ.get("TRITON_INTERPRET") != "1" or call.q.device.type != "cpu":
        raise BackendUnavailable(
            f'backend="triton" needs CUDA tensors; q is on {call.q.device}',
            hint='use backend="cpu", or set TRITON_INTERPRET=1 before Triton is imported to interpret kernels',
        )
    from flexc.interpret import run

    return run(call, spec_of(call))


def spec_of(call: AttentionCall) -> AttentionSpec:
    """The part of a call that decides its kernel.

    Raises:
        UnsupportedDtype: an element type that the kernels do not take.
    """
    q, k, v = call.q, call.k, call.v
    if q.dtype is torch.float64:
        raise UnsupportedDtype(
            "q has dtype torch.float64, which the kernels do not take", hint='cast it, or use backend="reference"'
        )
    given = call.block_map
    size = q.element_size()
    aligned = all(_aligned(x, size if x is q else x.element_size()) for x in (q, k, v)) and (
        call.out is None or _aligned(call.out, size)
    )
    aligned = aligned and v.shape[3] * size % 16 == 0
    return AttentionSpec(
        score=call.mods.score,
        mask=call.mods.mask,
        captures=call.mods.captures,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        q_storage=STORAGE[q.dtype],
        k_storage=STORAGE[k.dtype],
        v_storage=STORAGE[v.dtype],
        blocks_from_map=call.mods.mask is not None or given is not None,
        has_sinks=call.sinks is not None,
        return_lse=call.return_lse,
        allow_tf32=call.allow_tf32 and q.dtype is torch.float32,
        aligned=aligned,
        positive_scale=call.scale > 0,
        long_indices=max(q.shape[2], k.shape[2]) >= _MAX_SHORT,
        unit_stride=unit_strides(call.values) if call.values else frozenset(),
        max_block_q=256 if given is None else _largest_power(given.block_q),
        max_block_kv=256 if given is None else _largest_power(given.block_kv),
    )


def _aligned(x: torch.Tensor, size: int) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    b, h, s, _ = x.stride()
    return ((b | h | s) * size | x.data_ptr()) % 16 == 0


def unit_strides(values: Sequence[Value]) -> frozenset[int]:
    """Slots of tensors whose last dimension is contiguous."""
    return frozenset(
        slot for slot, x in enumerate(values) if isinstance(x, torch.Tensor) and x.dim() and x.stride(-1) == 1
    )


def _largest_power(block: int) -> int:
    power = block & -block
    if power < 16:
        raise BlockMaskMismatch(
            f"the block mask has blocks of {block}, which no tile of 16 or more divides",
            hint="use blocks that are multiples of 16, such as 128",
        )
    return min(power, 256)


@lru_cache(maxsize=16)
def _target(index: int) -> str:
    from flexc.codegen.target import target_for_capability

    return target_for_capability(*torch.cuda.get_device_capability(index)).name


def run_kernel(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    values: tuple[Value, ...],
    block_map: BlockMap | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch a kernel that the caller chose, after the checks that choosing it would have made."""
    from flexc.codegen.arguments import Source

    check_tensors(q, k, v)
    if q.device.type != "cuda":
        raise DeviceMismatch(f"q is on {q.device}", hint="a compiled kernel runs on a GPU")
    if block_map is not None:
        check_block_map(block_map.q_len, block_map.kv_len, block_map.batch, block_map.heads, q, k)
    takes = {a.source: a.type for a in kernel.artifact.arguments}
    for name, x, source in (("q", q, Source.Q), ("k", k, Source.K), ("v", v, Source.V)):
        if takes[source] != f"*{STORAGE[x.dtype].value}":
            raise UnsupportedDtype(f"the kernel was made for {name} of type {takes[source][1:]}, not {x.dtype}")
    if (Source.MAP_RUNS in takes) != (block_map is not None):
        raise BlockMaskMismatch(
            "the kernel visits the blocks of a mask" if block_map is None else "the kernel visits all blocks",
            hint="pass block_mask=mask.block_mask(...)" if block_map is None else "leave out block_mask",
        )
    return _launch(kernel, q, k, v, values, block_map, scale, sinks, None, Source.LSE in takes)


def _launch(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    values: tuple[Value, ...],
    block_map: BlockMap | None,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, heads, q_len, _ = q.shape
    device = q.device
    if out is None:
        out = torch.empty((batch, heads, q_len, v.shape[3]), dtype=q.dtype, device=device)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=device) if return_lse else None
    programs = -(-q_len // kernel.artifact.block_q) * heads * batch
    if programs == 0:
        return out, lse
    offsets, runs = (None, None) if block_map is None else _on_device(block_map, device)
    tensors = Tensors(q, k, v, out, lse, None if sinks is None else sinks.float(), offsets, runs)
    arguments = pack(kernel.artifact.arguments, tensors, values, block_map, scale)
    if device.index == torch.cuda.current_device():
        kernel.launcher.launch(programs, device.index, arguments)
    else:
        with torch.cuda.device(device):
            kernel.launcher.launch(programs, device.index, arguments)
    return out, lse


def _on_device(block_map: BlockMap, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    key = (id(block_map), device.index)
    found = _uploaded.get(key)
    if found is None:
        offsets = torch.as_tensor(block_map.offsets, dtype=torch.int32, device=device)
        runs = torch.as_tensor(block_map.runs, dtype=torch.int32, device=device)
        found = (block_map, offsets, runs)  # holding the map keeps its id its own
        _uploaded.put(key, found)
    return found[1], found[2]
