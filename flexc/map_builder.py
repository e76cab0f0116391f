"""Builds the block map of a mask where the tensors are: nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from flexc.callspec import unit_strides
from flexc.codegen.map_module import SLAB, MapKernel, map_module
from flexc.device_map import DeviceMap, empty_map, ints, row_capacity
from flexc.errors import InternalError
from flexc.frontend.value import Value
from flexc.id_vectors import IdVectors, id_vectors
from flexc.ir.expr import Expr, inputs_of, topological
from flexc.ir.graph import Capture
from flexc.ir.map_form import MapForm, MapSpec, map_form
from flexc.ir.ops import Input, Op
from flexc.ir.runs import TileGrid
from flexc.ir.types import Storage
from flexc.map_kernel import runner_for


@dataclass(frozen=True, slots=True)
class BoundMask:
    """A simplified mask with what it captured, by slot: the captures of the graph, and their values."""

    mask: Expr
    captures: tuple[Capture, ...]
    values: tuple[Value, ...]


def build_device_map(bound: BoundMask, grid: TileGrid, device: torch.device) -> DeviceMap:
    """The map of a mask, built by a kernel on `device`, where its captured tensors are.

    `grid` says batches and heads as the mask reads them. No value comes back to the host: this may run under
    `torch.cuda.set_sync_debug_mode("error")`, and inside the capture of a CUDA graph.
    """
    if grid.rows == 0 or grid.kv_blocks == 0:
        return empty_map(grid, device)
    kernel, form, values = map_kernel(bound, grid)
    run = runner_for(kernel, device)
    is_open = form.closed is None or not form.closed.is_exact or form.columns is not None
    rows, capacity, grids = grid.rows, row_capacity(grid, is_open=is_open), grid.batch * grid.heads
    counts, slab = ints(device, rows + 1), ints(device, rows, SLAB, 4)
    stretches = ints(device, rows * capacity, 4)
    named: dict[str, torch.Tensor | int] = {
        "counts_ptr": counts,
        "slab_ptr": slab,
        "offsets_ptr": counts,
        "stretches_ptr": stretches,
        "columns_ptr": counts,
        "q_len": grid.q_len,
        "kv_len": grid.kv_len,
        "heads": grid.heads,
        "block_q": grid.block_q,
        "block_kv": grid.block_kv,
        "capacity": capacity,
    }
    if form.columns is not None:
        named["columns_ptr"] = ints(device, grids * grid.kv_blocks)
        run(grids * grid.kv_blocks, {**named, "phase": 0}, values)
    run(rows, {**named, "phase": 1}, values)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    run(rows, {**named, "offsets_ptr": offsets, "phase": 2}, values)
    return DeviceMap(grid, offsets, stretches, is_open)


def map_kernel(bound: BoundMask, grid: TileGrid) -> tuple[MapKernel, MapForm, tuple[Value, ...]]:
    """The kernel that builds the map of a mask, what it knows of the mask, and the values that it reads."""
    form = form_of(bound, grid)
    captures, values = _with_id_vectors(bound, form)
    return _kernel(MapSpec(form, captures, unit_strides(values))), form, values


def form_of(bound: BoundMask, grid: TileGrid) -> MapForm:
    """What the kernel of a mask knows of its tiles, for these captured values and lengths."""
    form = map_form(bound.mask, len(bound.captures)).for_call(bound.values, grid.q_len, grid.kv_len)
    ids = [bound.values[r.ids] for r in form.runs]
    if any(not isinstance(x, torch.Tensor) or x.is_floating_point() for x in ids):
        return replace(form, closed=None, runs=())  # NaN is no id: it does not equal itself
    return form


@lru_cache(maxsize=256)
def _slots_of_ranges(form: MapForm) -> frozenset[object]:
    ranges = form.closed.ranges if form.closed else ()
    roots = [bound for r in ranges for bound in (r.first, r.end, r.full_first, r.full_end)]
    return frozenset(node.attr for node in topological(*roots) if node.op is Op.LOAD)


def _with_id_vectors(bound: BoundMask, form: MapForm) -> tuple[tuple[Capture, ...], tuple[Value, ...]]:
    """The captures and their values, and after them the vectors of the ids that the form reads."""
    captures, values = list(bound.captures), list(bound.values)
    read = _slots_of_ranges(form)
    for runs in form.runs:
        ids = bound.values[runs.ids]
        if not isinstance(ids, torch.Tensor):
            raise InternalError(f"block map: ids in slot {runs.ids} are a {type(ids).__name__}")
        slots = (runs.run_first, runs.run_end, runs.hull_first, runs.hull_end)
        if slots != tuple(range(len(values), len(values) + 4)):
            raise InternalError(f"block map: vectors of ids in slots {slots}")
        wanted = frozenset(f for f, s in zip(IdVectors._fields, slots, strict=True) if s in read)
        values += id_vectors(ids, wanted)
        name = bound.captures[runs.ids].name
        captures += [Capture(f"{name}_{fact}", Storage.I32, ids.dim()) for fact in IdVectors._fields]
    return tuple(captures), tuple(values)


@lru_cache(maxsize=256)
def _kernel(spec: MapSpec) -> MapKernel:
    return map_module(spec)


def as_read(mask: Expr, grid: TileGrid) -> TileGrid:
    """The tiles that differ: one batch (head) where the mask does not read `b` (`h`)."""
    by_batch, by_head = _reads_batch_and_head(mask)
    return replace(grid, batch=grid.batch if by_batch else 1, heads=grid.heads if by_head else 1)


@lru_cache(maxsize=1024)
def _reads_batch_and_head(mask: Expr) -> tuple[bool, bool]:
    reads = inputs_of(mask)
    return Input.B in reads, Input.H in reads
