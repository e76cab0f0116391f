"""Every mod of the corpus compiles for three generations, without a GPU and without spills."""

from __future__ import annotations

import pytest

import flexc
from tests.mods import Entry, corpus

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]
MATRIX_INSTRUCTION = {"sm80": "mma.sync", "sm90": "wgmma.mma_async", "sm100": "tcgen05.mma"}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", list(MATRIX_INSTRUCTION))
@pytest.mark.parametrize("entry", ENTRIES)
def test_compiles_without_spills(entry: Entry, target: str, head_dim: int) -> None:
    case = entry.make()
    kernel = flexc.compile(
        mask_mod=case.mask,
        score_mod=case.score,
        head_dim=head_dim,
        target=target,
        return_lse=True,
        backend="triton",
    )
    (resources,) = kernel.resources.values()
    assert resources.spills == 0, kernel.explain()
    (ptx,) = kernel.ptx.values()
    assert MATRIX_INSTRUCTION[target] in ptx
    assert "cp.async" in ptx or "num_stages = 1" in kernel.explain()
