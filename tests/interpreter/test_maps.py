"""The kernels that build block maps, run by Triton's interpreter, against maps that are built on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flexc import device_map, masks
from flexc.codegen import map_tools
from flexc.codegen.map_module import SLAB
from flexc.device_map import DeviceMap
from flexc.device_map_cache import bound_mask
from flexc.ir.blockmap import BlockMap, TileKind, build_block_map, from_kinds
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Op
from flexc.ir.runs import TileGrid
from flexc.ir.simplify import simplify
from flexc.ir.stretches import stretches
from flexc.map_builder import BoundMask, as_read, build_device_map, form_of
from flexc.map_transforms import intersection, on_device, transposed
from flexc.mods import as_mask_mod
from tests.ir.expressions import BATCH, HEADS, KV_LEN, Q_LEN, booleans
from tests.mods import Entry, corpus

CPU = torch.device("cpu")
ENTRIES = [pytest.param(e, id=name) for name, e in corpus().items() if e.make().mask is not None]
BLOCKS = ((16, 16), (32, 48), (64, 16))


def bound(mask: Any) -> BoundMask:
    trace = as_mask_mod(mask).trace()
    return bound_mask(simplify(trace.graph.root), trace.graph.captures, trace.values)


def host_map(mask: BoundMask, grid: TileGrid) -> BlockMap:
    values = [x.numpy() if isinstance(x, torch.Tensor) else x for x in mask.values]
    sizes = {name: getattr(grid, name) for name in TileGrid.__dataclass_fields__}
    return build_block_map(mask.mask, values, **sizes)


def assert_same(built: DeviceMap, expected: BlockMap) -> None:
    offsets, walk = stretches(expected)
    np.testing.assert_array_equal(built.offsets.numpy(), offsets)
    np.testing.assert_array_equal(built.stretches[: offsets[-1]].numpy(), walk)
    np.testing.assert_array_equal(built.host().runs, expected.runs)
    np.testing.assert_array_equal(built.host().offsets, expected.offsets)


def check(
    mask: Any, q_len: int, kv_len: int, block_q: int, block_kv: int, batch: int = 1, heads: int = 1
) -> None:
    one = bound(mask)
    grid = as_read(one.mask, TileGrid(q_len, kv_len, block_q, block_kv, batch, heads))
    assert_same(build_device_map(one, grid, CPU), host_map(one, grid))


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_mask_of_the_corpus(entry: Entry) -> None:
    case = entry.make()
    block_q, block_kv = BLOCKS[sum(map(ord, entry.name)) % len(BLOCKS)]
    check(case.mask, case.q_len, case.kv_len, block_q, block_kv, case.batch, case.heads)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(mask=booleans(3), blocks=st.sampled_from([(4, 4), (7, 4), (4, 19)]))
def test_random_masks(mask: Expr, blocks: tuple[int, int]) -> None:
    root = simplify(mask)
    assume(all(node.op not in (Op.LOAD, Op.SCALAR, Op.SIZE) for node in topological(root)))
    assume(root.op is not Op.CONST)
    grid = as_read(root, TileGrid(Q_LEN, KV_LEN, *blocks, BATCH, HEADS))
    assert_same(build_device_map(BoundMask(root, (), ()), grid, CPU), host_map(BoundMask(root, (), ()), grid))


@pytest.mark.parametrize("block_q", [16, 200])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (300, 77), (31, 256), (1, 1)])
def test_lengths_and_block_sizes(q_len: int, kv_len: int, block_q: int) -> None:
    check(masks.sliding_window(70) | masks.prefix_lm(20), q_len, kv_len, block_q, 40)


@pytest.mark.parametrize(
    "ids",
    [
        [0] * 40 + [1] * 25 + [2] * 60,
        [3] * 40 + [1] * 25 + [3] * 20 + [0] * 40,
        list(np.random.default_rng(0).integers(0, 9, 125)),
    ],
    ids=["contiguous", "in pieces", "mixed"],
)
def test_ids_whether_or_not_equal_ones_are_neighbours(ids: list[int]) -> None:
    check(masks.document(torch.tensor(ids)) & masks.causal, 125, 125, 16, 16)
    check(masks.document(torch.tensor([ids, ids[::-1]])), 125, 125, 32, 16, batch=2)


@pytest.mark.parametrize("density", [0.05, 0.95])
def test_conditions_on_keys_alone(density: float) -> None:
    valid = torch.rand(2, 120, generator=torch.Generator().manual_seed(1)) < density
    valid[0, 60:] = False

    def padding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return valid[b, kv_idx]

    mask = masks.causal & padding
    assert form_of(bound(mask), TileGrid(120, 120, 16, 16, 2, 1)).columns is not None
    check(mask, 120, 120, 16, 16, batch=2)
    check(padding, 60, 120, 32, 16, batch=2)


def test_rows_with_more_stretches_than_one_pass_keeps() -> None:
    check(lambda b, h, q_idx, kv_idx: kv_idx % 32 < 16, 20, 32 * (SLAB + 2), 32, 16)


def test_a_row_with_too_many_stretches_ends_in_a_partial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_map, "FEW_STRETCHES", 3)
    monkeypatch.setattr(device_map, "MANY_STRETCHES", 3)
    mask = bound(lambda b, h, q_idx, kv_idx: (kv_idx % 32 < 16) & (kv_idx < 200))
    grid = TileGrid(20, 320, 16, 16, 1, 1)
    kinds = build_device_map(mask, grid, CPU).host().kinds()
    for row in kinds:
        assert row.tolist() == [2, 0, 2, 0, 2, *[1] * 8, *[0] * 7]


@pytest.mark.parametrize("lengths", [(0, 40), (40, 0), (0, 0)])
def test_nothing_to_visit(lengths: tuple[int, int]) -> None:
    check(masks.causal, *lengths, 16, 16)


def random_map(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> BlockMap:
    odds = [(0.2, 0.4, 0.4), (0.8, 0.1, 0.1), (0.4, 0.1, 0.5)][int(rng.integers(3))]
    kinds = rng.choice(3, size=shape, p=odds).astype(np.uint8)
    for axis in (2, 3):
        if rng.random() < 0.5:
            kinds = np.take(np.repeat(kinds, 3, axis), range(shape[axis]), axis)
    return from_kinds(
        kinds,
        q_len=shape[2] * 16 - 5,
        kv_len=shape[3] * 16 - 7 * int(rng.integers(2)),
        block_q=16,
        block_kv=16,
    )


@pytest.mark.parametrize("seed", range(6))
def test_transposes_and_intersections(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = (int(rng.integers(1, 12)), int(rng.integers(1, 12)))
    one, two = random_map(rng, (2, 2, *blocks)), random_map(rng, (1, 2, *blocks))
    assert_same(transposed(on_device(one, CPU)), one.transpose())
    if (one.q_len, one.kv_len) == (two.q_len, two.kv_len):
        assert_same(intersection(on_device(one, CPU), on_device(two, CPU)), one.intersect(two))


def test_a_column_with_more_changes_than_are_kept() -> None:
    kinds = np.zeros((1, 1, 2 * map_tools.CHANGES, 2), np.uint8)
    kinds[0, 0, ::7, 0] = TileKind.FULL
    kinds[0, 0, ::8, 1] = TileKind.PARTIAL
    kinds[0, 0, 100:200:3, 1] = TileKind.FULL
    one = from_kinds(kinds, q_len=16 * kinds.shape[2], kv_len=32, block_q=16, block_kv=16)
    assert_same(transposed(on_device(one, CPU)), one.transpose())
