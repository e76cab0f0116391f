"""Which names of a line the Hopper kernels' roles need."""

from __future__ import annotations

import ast
from typing import Any

import torch

from flexc.codegen.design import Design
from flexc.codegen.hopper_words import mentions, needed
from tests.codegen.generate import generate

DOCUMENTS = (torch.arange(4096) // 50).int()
KINDS = torch.randint(0, 300, (4096,), dtype=torch.int32)


def _rows_of_one_kind(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = (q_idx >= 100) & (q_idx < 200) & (KINDS[q_idx] > 4) & (DOCUMENTS[q_idx] == 3)
    return row | (DOCUMENTS[kv_idx] == DOCUMENTS[q_idx])


def test_a_keyword_is_no_mention() -> None:
    assert not mentions("mask", ["x = gl.load(p, mask=inside)"])
    assert mentions("mask", ["x = gl.load(p, mask=mask)"])
    assert mentions("mask", ["found = mask == other"])
    assert mentions("mask", ["x = y if mask==0 else z"])
    lines = ("mask = q_idx > 3", "x = gl.load(p, mask=inside)")
    assert needed(lines, ["x"]) == lines[1:]


def test_the_loading_warp_knows_no_row_of_a_mask() -> None:
    source = generate(_rows_of_one_kind, design=Design.HOPPER).source
    (loads,) = (f for f in ast.walk(ast.parse(source)) if getattr(f, "name", "") == "load_tiles")
    names = {node.id for node in ast.walk(loads) if isinstance(node, ast.Name)}
    assert "kv_idx" in names, "it reads what the mask needs of each key"
    assert "q_idx" not in names
