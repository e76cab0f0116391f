"""The kernels of block maps compile for three generations, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from flexc.codegen.map_module import MapKernel
from flexc.codegen.map_tools import map_tool
from flexc.codegen.target import TARGETS
from flexc.ir.runs import TileGrid
from flexc.ir.simplify import simplify
from flexc.map_builder import BoundMask, map_kernel
from flexc.map_kernel import artifact_for
from flexc.mods import as_mask_mod
from tests.mods import Entry, corpus

ENTRIES = [pytest.param(e, id=name) for name, e in corpus().items() if e.make().mask is not None]
GENERATIONS = ["sm80", "sm90", "sm100"]
FEW_BYTES = 32
"""Of spilled registers: a map is built once, and a word or two in the cache cost it nothing."""


def bound(mask: Any) -> BoundMask:
    trace = as_mask_mod(mask).trace()
    return BoundMask(simplify(trace.graph.root), trace.graph.captures, tuple(trace.values))


def compiles(kernel: MapKernel, target: str) -> None:
    artifact = artifact_for(kernel, TARGETS[target])
    assert artifact.resources.spills <= FEW_BYTES
    assert artifact.entry in artifact.ptx


@pytest.mark.parametrize("entry", ENTRIES)
def test_maps_of_masks(entry: Entry) -> None:
    case = entry.make()
    assert case.mask is not None
    grid = TileGrid(case.q_len, case.kv_len, 128, 128, case.batch, case.heads)
    kernel = map_kernel(bound(case.mask), grid)[0]
    compiles(kernel, GENERATIONS[sum(map(ord, entry.name)) % len(GENERATIONS)])


@pytest.mark.parametrize("target", GENERATIONS)
@pytest.mark.parametrize("name", ["list_changes", "transpose", "intersect"])
def test_tools(name: str, target: str) -> None:
    compiles(map_tool(name), target)


def test_one_source_serves_every_length_and_block_size() -> None:
    (entry,) = (e for e in corpus().values() if e.name == "document_causal")
    mask = bound(entry.make().mask)
    grids = (TileGrid(100, 100, 128, 64, 1, 1), TileGrid(9000, 77, 16, 128, 4, 1))
    assert len({map_kernel(mask, grid)[0].source for grid in grids}) == 1
