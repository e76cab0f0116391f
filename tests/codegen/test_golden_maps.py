"""The generated source of kernels that build and change block maps, as golden files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexc import masks
from flexc.codegen.map_tools import map_tool
from flexc.ir.runs import TileGrid
from flexc.map_builder import BoundMask, map_kernel
from flexc.resolve import resolve
from tests.conftest import Golden

DOCUMENTS = torch.zeros(64, dtype=torch.int32)
VALID = torch.ones(2, 64, dtype=torch.bool)


def is_valid(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return VALID[b, kv_idx]


CASES = {
    "causal": masks.causal,
    "documents_and_padding": masks.causal & masks.document(DOCUMENTS) & is_valid,
    "natten2d": masks.natten2d(32, 48, 7),
}


@pytest.mark.parametrize("name", list(CASES))
def test_map(name: str, golden: Golden) -> None:
    mods, values, _ = resolve(None, CASES[name])
    assert mods.mask is not None
    kernel, _, _ = map_kernel(BoundMask(mods.mask, mods.captures, values), TileGrid(64, 64, 16, 16, 2, 1))
    signature = kernel.source.partition("def block_map(")[2].partition("):")[0]
    assert [x.strip() for x in signature.split(",") if x.strip()] == [a.name for a in kernel.arguments]
    golden(kernel.source)


def test_tools(golden: Golden) -> None:
    golden(map_tool("transpose").source)
