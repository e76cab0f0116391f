"""Every mod of the corpus compiles, without a GPU and without spills.

For one of three generations and one of two head dimensions, in turn, so that a run stays short; for all of
them with `--whole-corpus`, as `make newest` has it.
"""

from __future__ import annotations

from itertools import product

import pytest

import flexc
from tests.mods import Entry, corpus

MATRIX_INSTRUCTION = {"sm80": "mma.sync", "sm90": "wgmma.mma_async", "sm100": "tcgen05.mma"}
HEAD_DIMS = (64, 128)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every mod for one target at one head dimension, or for all at both."""
    whole = metafunc.config.getoption("--whole-corpus")
    metafunc.parametrize(
        ("entry", "target", "head_dim"),
        [
            pytest.param(entry, target, head_dim, id=f"{name}-{target}-{head_dim}")
            for n, (name, entry) in enumerate(corpus().items())
            for c, (head_dim, target) in enumerate(product(HEAD_DIMS, MATRIX_INSTRUCTION))
            if whole or n % (len(HEAD_DIMS) * len(MATRIX_INSTRUCTION)) == c
        ],
    )


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
