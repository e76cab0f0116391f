"""Block masks: equal to PyTorch's, convertible, sliceable, cached; and every mistake an error."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree

import flexc
from flexc import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
from flexc.block_mask import as_block_mask
from flexc.device_map import DeviceMap
from flexc.errors import (
    BlockIndexOutOfRange,
    BlockMaskMismatch,
    InvalidBlockMask,
    NotAMod,
    SlicedBlockMask,
    UnsupportedFeature,
)
from flexc.ir.blockmap import BlockMap
from flexc.ir.stretches import stretches
from flexc.map_cache import _found
from tests.mods import corpus

TENSORS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
    "dq_write_order",
    "dq_write_order_full",
)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 90)


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx // 64 + h) % 3 != b)


MASKS = [causal, window, by_head]
SIZES: list[int | tuple[int, int]] = [128, (64, 32), 16, (20, 48)]
INDICES: list[Any] = [
    0,
    (slice(None), 1),
    (slice(0, 1), slice(1, 3)),
    (0, slice(None), torch.tensor([0])),
    (slice(None), torch.tensor([2, 0, 2, 1])),
    (slice(None), slice(None), 0),
    (-1, -1, -1),
]


def _assert_same(ours: Any, theirs: Any) -> None:
    for name in TENSORS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype is b.dtype, name
            assert torch.equal(a, b), name
    for name in ("shape", "seq_lengths", "BLOCK_SIZE", "mask_mod"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.numel() == theirs.numel()
    least = 0 if isinstance(ours, BlockMask) else -math.inf  # PyTorch falls below
    assert ours.sparsity() == pytest.approx(max(least, theirs.sparsity()))
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    shown = f"{theirs.sparsity():.2f}%", f"{ours.sparsity():.2f}%"
    assert str(ours) == str(theirs).replace(*shown)
    assert repr(ours) == repr(theirs).replace(*shown)
    for flatten in (True, False):
        for a, b in zip(ours.as_tuple(flatten), theirs.as_tuple(flatten), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert ours.to_string((3, 2), limit=1) == theirs.to_string((3, 2), limit=1)
    assert ours.to_string(-1) == theirs.to_string(-1)


@pytest.mark.parametrize("options", [{}, {"separate_full_blocks": False}, {"compute_dq_write_order": True}])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("lengths", [(256, 256), (500, 300), (130, 277), (1, 400)])
@pytest.mark.parametrize("mask", MASKS)
def test_equal_to_pytorch(mask: Any, lengths: tuple[int, int], size: Any, options: dict[str, Any]) -> None:
    ours = create_block_mask(mask, 2, 3, *lengths, device="cpu", BLOCK_SIZE=size, **options)
    theirs = torch_flex.create_block_mask(mask, 2, 3, *lengths, device="cpu", BLOCK_SIZE=size, **options)
    _assert_same(ours, theirs)
    _assert_same(ours.to_torch(), theirs)
    _assert_same(ours.to("cpu"), theirs)
    _assert_same(BlockMask.from_torch(theirs), theirs)


# PyTorch takes no bound methods, and on the CPU no indices that are out of range where the mask is false.
OF_BOTH = [n for n, e in corpus().items() if e.kind != "score" and not e.out_of_range and n != "bound_method"]


@pytest.mark.parametrize("name", OF_BOTH)
def test_masks_of_the_corpus_equal_pytorch(name: str) -> None:
    case = corpus()[name].make()
    assert case.mask is not None
    sizes = (case.batch, case.heads, case.q_len, case.kv_len)
    ours = create_block_mask(case.mask, *sizes, device="cpu", BLOCK_SIZE=(32, 48))
    theirs = torch_flex.create_block_mask(case.mask, *sizes, device="cpu", BLOCK_SIZE=(32, 48))
    _assert_same(ours, theirs)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("mask", [causal, by_head])
def test_slices_are_those_of_pytorch(mask: Any, index: Any) -> None:
    ours = create_block_mask(mask, 2, 3, 512, 300, device="cpu", BLOCK_SIZE=64)[index]
    theirs = torch_flex.create_block_mask(mask, 2, 3, 512, 300, device="cpu", BLOCK_SIZE=64)[index]
    ours.mask_mod = theirs.mask_mod = mask
    _assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (2, "index 2 into the 2 batches"),
        (-3, "index -3 into the 2 batches"),
        ((0, 3), "3 heads"),
        ((0, 0, 8), "8 query blocks .*\n.* from -8 to 7"),
        ((slice(None), torch.tensor([0, 3])), "index 3 into the 3 heads"),
        ((slice(None), torch.tensor([True, False])), "length 2 over 3 heads"),
    ],
    ids=str,
)
def test_indices_out_of_range_are_errors(index: Any, message: str) -> None:
    mask = create_block_mask(by_head, 2, 3, 512, 300, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(BlockIndexOutOfRange, match=message) as e:
        mask[index]
    assert isinstance(e.value, IndexError)


def test_slices_by_flags_are_slices_by_positions() -> None:
    mask = create_block_mask(by_head, 2, 3, 512, 300, device="cpu", BLOCK_SIZE=64)
    flags = torch.tensor([True, False, True])
    _assert_same(mask[:, flags], mask[:, torch.tensor([0, 2])])
    with pytest.raises(InvalidBlockMask, match="indexed by '0'"):
        mask["0"]  # type: ignore[index]
    with pytest.raises(InvalidBlockMask, match="at most one tensor"):
        mask[torch.tensor([0]), torch.tensor([0])]


def test_explicit_orders_are_kept_and_bind_a_mask_to_its_blocks() -> None:
    theirs: Any = torch_flex.create_block_mask(
        by_head, 2, 3, 256, 256, device="cpu", BLOCK_SIZE=64, compute_dq_write_order=True
    )
    theirs.dq_kv_order = torch.arange(2 * 3 * 4, dtype=torch.int32).view(2, 3, 4)
    theirs.dq_kv_order_spt = None
    ours: Any = BlockMask.from_torch(theirs)
    for one in (ours, ours.to_torch(), ours.to("cpu")):
        assert torch.equal(one.dq_kv_order, theirs.dq_kv_order)
        assert torch.equal(one.dq_write_order, theirs.dq_write_order)
    for refuses in (lambda mask: mask[0], lambda mask: mask._adjust(128, 128)):
        with pytest.raises(NotImplementedError):
            refuses(theirs)
        with pytest.raises(UnsupportedFeature, match="tensor dq_kv_order"):
            refuses(ours)


def test_adjust_is_that_of_pytorch() -> None:
    ours = create_block_mask(window, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    theirs = torch_flex.create_block_mask(window, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    _assert_same(ours._adjust(256, 448), theirs._adjust(256, 448))
    with pytest.raises(BlockMaskMismatch, match=r"\(1024, 512\)"):
        ours._adjust(1024, 512)


def test_a_slice_for_decoding_computes() -> None:
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    whole = create_block_mask(causal, None, None, 300, 300, device="cpu", BLOCK_SIZE=64)
    position = 200
    part = whole[:, :, position // 64]
    with pytest.raises(SlicedBlockMask, match="mask_mod"):
        flexc.attention(q, k, v, block_mask=part)
    part.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + position, kv_idx)
    with pytest.raises(BlockMaskMismatch, match="seq_lengths"):
        flexc.attention(q, k, v, block_mask=part)
    part.seq_lengths = (1, 300)
    out = flexc.attention(q, k, v, block_mask=part)
    torch.testing.assert_close(out, flexc.attention(q, k[:, :, :201], v[:, :, :201]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_pytorch_computes_with_a_block_mask_of_flexc() -> None:
    q, k, v = torch.randn(2, 3, 200, 16), torch.randn(2, 3, 130, 16), torch.randn(2, 3, 130, 16)
    ours = create_block_mask(by_head, 2, 3, 200, 130, device="cpu", BLOCK_SIZE=64)
    expected = flexc.attention(q, k, v, block_mask=ours)
    masks: list[Any] = [ours, ours.to_torch()]
    for mask in masks:
        out = torch_flex.flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(out, expected)


def test_a_sliced_mask_of_pytorch_is_refused() -> None:
    theirs = torch_flex.create_block_mask(causal, 1, 1, 256, 256, device="cpu")[:, :, 0]
    with pytest.raises(SlicedBlockMask):
        as_block_mask(theirs)
    with pytest.raises(NotAMod, match="Tensor"):
        as_block_mask(torch.ones(2))  # type: ignore[arg-type]


def test_a_mask_of_pytorch_is_converted_once_until_it_changes() -> None:
    theirs = torch_flex.create_block_mask(causal, 1, 1, 256, 256, device="cpu")
    first = as_block_mask(theirs)
    assert as_block_mask(theirs) is first
    theirs.mask_mod = window
    assert as_block_mask(theirs).mask_mod is window


def test_lists_in_any_order_and_in_both_kinds() -> None:
    counts = torch.tensor([[[3, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[3, 0, 1, 7], [9, 9, 9, 9]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[3, 2, 0, 0], [3, 0, 0, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, full_counts, full_indices, 32, seq_lengths=(64, 120))
    block_map = mask.block_map
    assert isinstance(block_map, BlockMap)
    # Block 3 is full by its list, but hangs over the 120 keys.
    assert block_map.kinds().tolist() == [[1, 1, 2, 1], [0, 0, 0, 1]]
    assert mask.kv_num_blocks.tolist() == [[[3, 1]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_indices": torch.full((1, 1, 2, 4), 4, dtype=torch.int32)}, "blocks 4 to 4"),
        ({"kv_indices": torch.full((1, 1, 2, 4), -1, dtype=torch.int32)}, "blocks -1 to -1"),
        ({"kv_num_blocks": torch.full((1, 1, 2), 5, dtype=torch.int32)}, "lists 5 blocks"),
        ({"kv_num_blocks": torch.ones((1, 2), dtype=torch.int32)}, "kv_num_blocks is"),
        ({"full_kv_num_blocks": torch.ones((1, 1, 2), dtype=torch.int32)}, "one is None"),
        ({"seq_lengths": (65, 128)}, "2 query blocks; a q length of 65"),
        ({"BLOCK_SIZE": 8}, "BLOCK_SIZE is 8"),
    ],
)
def test_bad_lists(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kv_num_blocks": torch.ones((1, 1, 2), dtype=torch.int32),
        "kv_indices": torch.zeros((1, 1, 2, 4), dtype=torch.int32),
        "BLOCK_SIZE": 32,
        "seq_lengths": (64, 128),
    }
    BlockMask.from_kv_blocks(**arguments)
    with pytest.raises(InvalidBlockMask, match=message):
        BlockMask.from_kv_blocks(**(arguments | changes))


def test_bad_arguments() -> None:
    with pytest.raises(InvalidBlockMask, match="BLOCK_SIZE is 8"):
        create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=8)
    with pytest.raises(InvalidBlockMask, match="Q_LEN is -1: it can't be negative"):
        create_block_mask(causal, 1, 1, -1, 64, device="cpu")
    with pytest.raises(InvalidBlockMask, match=r"KV_LEN is 64\.0"):
        create_block_mask(causal, 1, 1, 64, 64.0, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockMask, match="B is 'two'"):
        create_block_mask(causal, "two", 1, 64, 64, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockMask, match="H is -1"):
        create_block_mask(causal, 1, -1, 64, 64, device="cpu")
    with pytest.raises(InvalidBlockMask, match="at most 3"):
        create_block_mask(causal, 1, 1, 64, 64, device="cpu")[0, 0, 0, 0]
    with pytest.raises(TypeError):
        create_block_mask(lambda q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 64, 64, device="cpu")
    with pytest.raises(NotAMod):
        and_masks(causal, 3)  # type: ignore[arg-type]
    with pytest.raises(NotAMod, match="2 arguments"):
        create_mask(lambda q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 64, 64, device="cpu")


@pytest.mark.parametrize("integer", [np.int64, torch.tensor])
def test_lengths_of_any_integer_type(integer: Callable[[int], Any]) -> None:
    mask = create_block_mask(causal, integer(2), integer(1), integer(300), integer(200), device="cpu")
    assert [type(n) for n in mask.shape] == [int] * 4
    _assert_same(mask, create_block_mask(causal, 2, 1, 300, 200, device="cpu"))


@pytest.mark.parametrize("lengths", [(0, 100), (100, 0), (0, 0)])
def test_empty_lengths(lengths: tuple[int, int]) -> None:
    mask = create_block_mask(causal, 2, None, *lengths, device="cpu", BLOCK_SIZE=64)
    assert mask.shape == (2, 1, *lengths)
    assert mask.numel() == 0
    assert mask.sparsity() == 0.0
    assert mask.kv_num_blocks.shape == (2, 1, -(-lengths[0] // 64))
    assert mask.to_dense().sum() == 0


@pytest.mark.parametrize("lengths", [(1, 1), (1, 400), (100, 20), (129, 129)])
def test_sparsity_is_a_percentage_for_lengths_below_a_block(lengths: tuple[int, int]) -> None:
    mask = create_block_mask(causal, None, None, *lengths, device="cpu")
    assert 0 <= mask.sparsity() <= 100
    assert f"sparsity={mask.sparsity():.2f}%" in repr(mask)


def test_dense_masks_equal_those_of_pytorch() -> None:
    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx + h >= kv_idx, score + b, -float("inf"))

    for mod in (causal, by_head, score, noop_mask, and_masks(causal, window), or_masks(by_head, window)):
        ours = create_mask(mod, 2, 3, 40, 50, device="cpu")
        assert ours.dtype is torch.bool
        assert torch.equal(ours, torch_flex.create_mask(mod, 2, 3, 40, 50, device="cpu"))
    assert create_mask(causal, None, None, 4, 5, device="cpu").shape == (1, 1, 4, 5)
    assert create_mask(and_masks(), None, None, 4, 5, device="cpu").all()
    assert not create_mask(or_masks(), None, None, 4, 5, device="cpu").any()


def test_pickle_and_deepcopy() -> None:
    mask = create_block_mask(by_head, 2, 3, 200, 200, device="cpu", BLOCK_SIZE=64)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        _assert_same(other, mask)
        assert repr(other) == repr(mask)


@pytest.mark.parametrize("options", [{}, {"separate_full_blocks": False}, {"compute_dq_write_order": True}])
def test_a_tree_reaches_the_tensors_of_a_mask(options: dict[str, Any]) -> None:
    mask = create_block_mask(by_head, 2, 3, 200, 130, device="cpu", BLOCK_SIZE=64, **options)
    batch = {"mask": mask, "x": torch.zeros(2)}
    leaves, spec = pytree.tree_flatten(batch)
    assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
    _assert_same(pytree.tree_unflatten(leaves, spec)["mask"], mask)
    _assert_same(pytree.tree_map_only(torch.Tensor, torch.clone, batch)["mask"], mask)
    again = create_block_mask(by_head, 2, 3, 200, 130, device="cpu", BLOCK_SIZE=64, **options)
    assert pytree.tree_structure(again) == pytree.tree_structure(mask)
    names = [str(path[-1]) for path, _ in pytree.tree_flatten_with_path(mask)[0]]
    assert names[:2] == [".offsets", ".tiles"]


def test_a_map_on_a_device_is_copied_and_flattened_as_it_is() -> None:
    mask = create_block_mask(by_head, 2, 3, 200, 130, device="cpu", BLOCK_SIZE=64)
    assert isinstance(mask.block_map, BlockMap)
    offsets, walk = (torch.from_numpy(x) for x in stretches(mask.block_map))
    there = DeviceMap(mask.block_map.grid, offsets, walk, origin=lambda: None)
    on_device = BlockMask.from_map(there, by_head, shape=(2, 3))
    _assert_same(on_device, mask)
    leaves, spec = pytree.tree_flatten(on_device)
    assert leaves[0] is offsets
    assert leaves[1] is walk
    _assert_same(pytree.tree_unflatten(leaves, spec), mask)
    for other in (pickle.loads(pickle.dumps(on_device)), copy.deepcopy(on_device)):
        assert isinstance(other.block_map, DeviceMap)
        _assert_same(other, mask)


def test_leaves_without_values_are_handed_on() -> None:
    mask = create_block_mask(causal, None, None, 200, 130, device="cpu", BLOCK_SIZE=64)
    numbered = pytree.tree_map(lambda leaf: "leaf", mask)
    assert pytree.tree_leaves(numbered) == ["leaf"] * 5
    meta = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), mask)
    assert meta.device.type == "meta"
    assert [x.device.type for x in pytree.tree_leaves(meta) if x is not None] == ["meta", "meta"]


def _map_of(fn: Callable[..., Any], length: int = 256) -> Any:
    return create_block_mask(fn, None, None, length, length, device="cpu", BLOCK_SIZE=64).block_map


def test_maps_are_found_again_only_when_what_they_are_made_of_changes() -> None:
    ids = torch.arange(256) // 64
    width = 3

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx - kv_idx < width)

    first = _map_of(documents)
    assert _map_of(documents) is first
    width = 100
    wider = _map_of(documents)
    assert wider is not first
    ids[128:] = 0
    changed = _map_of(documents)
    assert changed is not wider
    assert (changed.kinds() != wider.kinds()).any()
    with torch.inference_mode():
        ids = torch.arange(256) // 128
        of_inference = _map_of(documents)
        assert _map_of(documents) is of_inference
        ids.zero_()
        assert _map_of(documents) is not of_inference


def test_a_new_tensor_in_a_closure_is_another_map_and_the_cache_stays_bounded() -> None:
    def documents(ids: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]

    for parts in range(1, 200):
        ids = torch.arange(256) * parts // 256
        kinds = _map_of(documents(ids)).kinds()
        assert kinds[0, 3] == (2 if parts == 1 else 0)
        del ids
        gc.collect(0)
    assert len(_found) <= 64


def test_schedule_of_a_block_mask() -> None:
    mask = create_block_mask(by_head, 2, 3, 512, 512, device="cpu", BLOCK_SIZE=64)
    plan = mask.schedule()
    assert plan.costs.shape == plan.order.shape == (2 * 3 * 8,)
    order = torch.from_numpy(plan.order)
    assert order.dtype is torch.int32
    visited = mask.to_dense().sum(-1).reshape(-1)
    assert visited[order[0]] == visited.max()
    assert visited.sum() <= plan.total <= 1.25 * visited.sum()


def test_a_long_causal_mask_is_small() -> None:
    mask = create_block_mask(causal, None, None, 1_000_000, 1_000_000, device="cpu", BLOCK_SIZE=128)
    block_map = mask.block_map
    assert isinstance(block_map, BlockMap)
    assert block_map.runs.nbytes + block_map.offsets.nbytes < 400_000
    assert mask.sparsity() == pytest.approx(50, abs=0.1)


def test_printing_a_long_mask_takes_no_dense_array() -> None:
    mask = create_block_mask(window, None, None, 1_000_000, 1_000_000, device="cpu", BLOCK_SIZE=16)
    tracemalloc.start()
    text, representation = str(mask), repr(mask)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * 2**20  # one byte a tile would be 4 GB
    picture = text.splitlines()[2:-1]
    assert len(picture) == 20
    assert [line[2 * i : 2 * i + 2] for i, line in enumerate(picture)] == ["░░"] * 20
    assert "torch.Size([1, 1, 62500, 62500])" in representation
