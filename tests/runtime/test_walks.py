"""Kernels whose programs walk along a head: how many are launched, and for which calls they are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flexc
from flexc import gpu, launch, masks
from flexc.artifact import Artifact
from flexc.build import kernel_for
from flexc.codegen.hopper_walk import parts_of_head
from flexc.kernel import Kernel
from flexc.resolve import resolve
from tests.runtime.test_few_rows import _call


@pytest.mark.parametrize(
    ("tiles", "heads", "parts"),
    [(128, 128, 3), (64, 128, 3), (32, 8, 32), (4, 8, 4), (128, 32, 12), (1, 500, 1)],
)
def test_a_head_has_as_many_parts_as_fill_the_gpu(tiles: int, heads: int, parts: int) -> None:
    assert parts_of_head(tiles, heads, places=396) == parts


@pytest.mark.parametrize("heads", [1, 7, 128, 400, 1024, 100_000])
@pytest.mark.parametrize("tiles", [1, 5, 130, 16_384])
def test_parts_are_no_more_than_tiles_and_no_longer_than_they_need_be(tiles: int, heads: int) -> None:
    parts = parts_of_head(tiles, heads, places=396)
    assert 1 <= parts <= tiles
    assert parts == tiles or heads * (parts + 1) > 396, "all places are in use"


def _kernel(width: int) -> Kernel:
    mods, values, _ = resolve(None, masks.sliding_window(width))
    q = torch.zeros(2, 4, 700, 64).bfloat16()
    call = _call(700, mods=mods, values=values, q=q, k=q, v=q)
    design, spec = gpu.served_by(call, "sm90", "auto")
    return kernel_for(spec, "sm90", (), mods.sources, design)


def test_a_launch_has_a_multiple_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: 4)
    device = torch.device("cuda", 0)

    def programs(artifact: Artifact, q_len: int, heads: int) -> int:
        return launch.programs_of(artifact, q_len, heads, device)

    walks = _kernel(128).artifact
    assert (walks.shares_heads, walks.shares_tiles, walks.beside) == (True, False, 3)
    assert programs(walks, 700, 8) == 8 * parts_of_head(11, 8, places=12)
    assert programs(walks, 700, 0) == programs(walks, 0, 8) == 0
    usual = _kernel(4096).artifact
    assert (usual.shares_heads, usual.shares_tiles) == (False, True)
    assert programs(usual, 700, 8) == 4
    assert programs(usual, 100, 2) == 2
    assert programs(replace(usual, arguments=()), 700, 8) == 32


def test_a_saved_kernel_still_says_how_it_is_launched(tmp_path: Any) -> None:
    kernel = _kernel(128)
    kernel.save(tmp_path / "walk")
    assert flexc.load(tmp_path / "walk").artifact == kernel.artifact
