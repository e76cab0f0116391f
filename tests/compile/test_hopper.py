"""Hopper kernels of mods of every kind: the machine code holds what their design promises."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores
from flexc.build import kernel_for
from flexc.codegen.design import Design
from flexc.codegen.hopper_narrow import for_narrow_band
from flexc.kernel import Kernel
from flexc.resolve import resolve
from flexc.sass import read
from flexc.toolchain import disassemble, spills_in_matrix_loops
from tests.codegen.generate import spec_for
from tests.compile.machine_code import Promise, check
from tests.mods import Entry, corpus

CORPUS = (
    "natten2d",
    "prefix_lm_by_batch",
    "document_by_batch",
    "tree",
    "relative_bias",
    "gym_activation_gelu",
)
Mod = Callable[..., Any]


def _mods() -> dict[str, tuple[Mod | None, Mod | None]]:
    found = {name: corpus()[name].make() for name in CORPUS}
    mods: dict[str, tuple[Mod | None, Mod | None]] = {n: (case.mask, case.score) for n, case in found.items()}
    slopes = torch.ones(4)
    return {
        "plain": (None, None),
        "causal": (masks.causal, None),
        "window": (masks.sliding_window(64), None),
        "softcap_causal": (masks.causal, scores.softcap(20.0)),
        "alibi_causal": (masks.causal, scores.alibi(slopes)),
        **mods,
    }


MODS = _mods()


def _compile(name: str, head_dim: int, **arguments: Any) -> Kernel:
    mask, score = MODS[name]
    return flexc.compile(
        mask_mod=mask, score_mod=score, head_dim=head_dim, return_lse=True, backend="hopper", **arguments
    )


SPILLS = 8  # in all loops together: smaller tiles would cost more


def _check(kernel: Kernel, spills: int = SPILLS) -> None:
    consumers = kernel.artifact.block_q * kernel.artifact.packed_heads // 64
    ((entry, sass),) = kernel.sass.items()
    registers = {1: (256, 24), 2: (240, 24), 3: (160, 32)}[consumers]
    check(sass, kernel.ptx[entry], kernel.resources[entry], Promise(consumers, registers, spills=spills))


FORMS = [
    pytest.param(name, head_dim, marks=[pytest.mark.whole] if name in CORPUS and n % 2 == d else [])
    for n, name in enumerate(MODS)
    for d, head_dim in enumerate((64, 128))
]
"""The mods at both head dimensions, those of the corpus at one of them in turn."""


@pytest.mark.parametrize(("name", "head_dim"), FORMS)
def test_machine_code(name: str, head_dim: int) -> None:
    _check(_compile(name, head_dim))


# Every mod of the corpus, at one head dimension. Those that load a pair keep some of its addresses in memory.
@pytest.mark.whole
@pytest.mark.parametrize(
    ("entry", "head_dim"),
    [pytest.param(entry, (64, 128)[n % 2], id=name) for n, (name, entry) in enumerate(corpus().items())],
)
def test_machine_code_of_the_corpus(entry: Entry, head_dim: int) -> None:
    case = entry.make()
    kernel = flexc.compile(
        mask_mod=case.mask, score_mod=case.score, head_dim=head_dim, return_lse=True, backend="hopper"
    )
    _check(kernel, spills=128 if entry.name == "gym_graphormer_edges" else 4)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(256, 256), (192, 128), (192, 192), (96, 96), (72, 72), (64, 128)]
)
def test_other_head_dims(head_dim: int, head_dim_v: int) -> None:
    kernel = _compile("causal", head_dim, head_dim_v=head_dim_v, dtype=torch.float16)
    _check(kernel)


@pytest.mark.parametrize("name", ["plain", "causal", "prefix_lm_by_batch"])
def test_three_warpgroups_issue_their_products_in_turns(name: str) -> None:
    (sass,) = _compile(name, 64).sass.values()
    waits = Counter(re.findall(r"BAR\.SYNC\S* (0x[0-9a-f]+), 0x100", sass))
    passed = Counter(re.findall(r"BAR\.ARV (0x[0-9a-f]+), 0x100", sass))
    assert waits.keys() == passed.keys() == {"0x8", "0x9", "0xa"}
    # The first one waits once more at the end: the last one passes it the turn before anything else.
    assert waits == passed
    (sass,) = _compile(name, 128).sass.values()
    assert "BAR.ARV" not in sass


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_by_distance_is_read_once_a_distance_not_once_a_pair(head_dim: int) -> None:
    kernel = _compile("relative_bias", head_dim)
    _check(kernel)
    (sass,) = kernel.sass.values()
    # Windows of 32 distances of a warp's tile of 16 rows: of the first step, of the next, and in the loop.
    # Tiles have 128 keys; at D=64 the ptxas of Triton 3.9 spills, and they have 64.
    keys, consumers = kernel.artifact.block_kv, kernel.artifact.block_q // 64
    assert keys == 128 or head_dim == 64
    windows = -(-(16 + keys - 1) // 32)
    assert sass.count("LDG.E") <= consumers * 3 * windows + 16
    assert sass.count("SHFL.IDX") >= consumers * 2 * (keys // 4 + 2)


def test_sinks() -> None:
    _check(_compile("causal", 128, sinks=True))


@pytest.mark.parametrize(
    ("name", "q_len", "group", "head_dim"),
    [
        ("causal", 8, 8, 128),
        ("alibi_causal", 16, 3, 64),
        pytest.param("alibi_causal", 1, 64, 128, marks=pytest.mark.whole),
        pytest.param("plain", 1, 8, 64, marks=pytest.mark.whole),
    ],
)
def test_rows_of_several_heads(name: str, q_len: int, group: int, head_dim: int) -> None:
    kernel = _compile(name, head_dim, q_len=q_len, group=group)
    rows = kernel.artifact.block_q * kernel.artifact.packed_heads
    assert rows == 64
    assert f"a tile holds {kernel.artifact.block_q} of each head" in kernel.explain()
    _check(kernel)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout(head_dim: int) -> None:
    spec = spec_for(masks.causal, scores.softcap(20.0), head_dim=head_dim, dropout=True)
    _check(kernel_for(spec, "sm90", design=Design.HOPPER))


@pytest.mark.parametrize(("width", "beside"), [(64, 3), (128, 3), (192, 2), (256, 2)])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_programs_that_walk_fit_beside_each_other(width: int, beside: int, return_lse: bool) -> None:
    mask = masks.sliding_window(width)
    mods, values, _ = resolve(None, mask)
    usual = spec_for(mask, head_dim=64, return_lse=return_lse, has_sinks=return_lse)
    spec = for_narrow_band(usual, values, None, {})
    artifact = kernel_for(spec, "sm90", (), mods.sources, Design.HOPPER).artifact
    assert artifact.shares_heads
    assert (artifact.beside, artifact.resources.warps) == (beside, 4)
    sass = disassemble(artifact.cubin)
    found = read(sass)
    assert found.matrix["HGMMA"] == 2 * spec.walk * 4, "one piece of code, with all tiles of keys"
    assert found.waits == 2
    assert spills_in_matrix_loops(sass) <= 8
    assert {"UTMALDG", "UTMASTG"} <= set(found.copies)
