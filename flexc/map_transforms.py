"""New maps from maps on a device, without waiting for it: the transpose, and what two have in common."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexc.codegen.map_module import MapKernel
from flexc.codegen.map_tools import CHANGES, map_tool
from flexc.device_map import DeviceMap, empty_map, ints, row_capacity
from flexc.errors import InternalError
from flexc.ir.blockmap import BlockMap
from flexc.ir.runs import TileGrid
from flexc.ir.stretches import stretches
from flexc.map_kernel import Named, runner_for


def on_device(block_map: BlockMap, device: torch.device) -> DeviceMap:
    """The map as stretches on `device`."""
    offsets, walk = (torch.from_numpy(x).to(device) for x in stretches(block_map))
    return DeviceMap(block_map.grid, offsets, walk)


def transposed(block_map: DeviceMap) -> DeviceMap:
    """The map with keys as rows, for the backward; see `BlockMap.transpose`.

    The work follows the number of rows and columns, and of places where a row differs from the one before.
    """
    grid, device = block_map.grid, block_map.device
    result = grid.transposed()
    columns = result.rows
    if grid.rows == 0 or columns == 0:
        return empty_map(result, device)
    changed = torch.zeros(columns, dtype=torch.int32, device=device)
    changes = ints(device, columns, CHANGES)
    named: dict[str, torch.Tensor | int] = {
        "offsets_ptr": block_map.offsets,
        "stretches_ptr": block_map.stretches,
        "changed_ptr": changed,
        "changes_ptr": changes,
        "q_blocks": grid.q_blocks,
        "kv_blocks": grid.kv_blocks,
    }
    runner_for(map_tool("list_changes"), device)(grid.rows, named)
    return _counted_and_filled(map_tool("transpose"), named, result, block_map.is_open, device)


def intersection(one: DeviceMap, two: DeviceMap) -> DeviceMap:
    """The lesser kind of each tile; see `BlockMap.intersect`."""
    a, b = one.grid, two.grid
    if replace(a, batch=1, heads=1) != replace(b, batch=1, heads=1):
        raise InternalError(f"block maps of {a} and {b}")
    grid = replace(a, batch=max(a.batch, b.batch), heads=max(a.heads, b.heads))
    device = one.device
    if grid.rows == 0 or grid.kv_blocks == 0:
        return empty_map(grid, device)
    named: dict[str, torch.Tensor | int] = {
        "offsets_ptr": one.offsets,
        "stretches_ptr": one.stretches,
        "other_offsets_ptr": two.offsets,
        "other_stretches_ptr": two.stretches,
        "q_blocks": grid.q_blocks,
        "kv_blocks": grid.kv_blocks,
        "heads": grid.heads,
    }
    for prefix, g in (("", a), ("other_", b)):
        named[f"{prefix}stride_b"] = g.q_blocks * g.heads if g.batch > 1 else 0
        named[f"{prefix}stride_h"] = g.q_blocks if g.heads > 1 else 0
    return _counted_and_filled(map_tool("intersect"), named, grid, one.is_open or two.is_open, device)


def _counted_and_filled(
    kernel: MapKernel, named: Named, grid: TileGrid, is_open: bool, device: torch.device
) -> DeviceMap:
    """Two launches with a program a row of `grid`: one counts the stretches, one writes them."""
    run = runner_for(kernel, device)
    counts, capacity = ints(device, grid.rows + 1), row_capacity(grid, is_open=is_open)
    out = ints(device, grid.rows * capacity, 4)
    both = {**named, "counts_ptr": counts, "out_ptr": out, "capacity": capacity}
    run(grid.rows, {**both, "out_offsets_ptr": counts, "phase": 1})
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    run(grid.rows, {**both, "out_offsets_ptr": offsets, "phase": 2})
    return DeviceMap(grid, offsets, out, is_open)
