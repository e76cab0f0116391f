"""The generated source of kernels that build and change block maps, as golden files."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from flexc import masks
from flexc.codegen.map_module import ENTRY, MAP_RESERVED
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


def generated(mask: Any) -> str:
    mods, values, _ = resolve(None, mask)
    assert mods.mask is not None
    kernel, _, _ = map_kernel(BoundMask(mods.mask, mods.captures, values), TileGrid(64, 64, 16, 16, 2, 1))
    signature = kernel.source.partition("def block_map(")[2].partition("):")[0]
    assert [x.strip() for x in signature.split(",") if x.strip()] == [a.name for a in kernel.arguments]
    return kernel.source


@pytest.mark.parametrize("name", list(CASES))
def test_map(name: str, golden: Golden) -> None:
    golden(generated(CASES[name]))


def test_names_of_the_template_are_no_names_of_captures() -> None:
    source = generated(CASES["documents_and_padding"])
    kernel = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == ENTRY)
    own = {n.id for n in ast.walk(kernel) if isinstance(n, ast.Name)} | {a.arg for a in kernel.args.args}
    of_captures = {name for name in own if name.startswith(("doc_ids_", "VALID_", "index"))}
    assert own - of_captures <= MAP_RESERVED


def test_tools(golden: Golden) -> None:
    golden(map_tool("transpose").source)
