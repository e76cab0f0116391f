"""Block maps built on the GPU: what the host would build, without a synchronisation, inside CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import flexc
from flexc import masks
from flexc.device_map import DeviceMap
from flexc.device_map_cache import transposed_on
from flexc.errors import MaskTooOpen
from flexc.ir.blockmap import BlockMap
from flexc.ir.stretches import stretches
from tests.gpu.synchronisation import no_synchronisation
from tests.mods import Entry, corpus
from tests.oracle import golden

ENTRIES = [pytest.param(e, id=name) for name, e in corpus().items() if e.make().mask is not None]
BLOCKS = ((16, 16), (32, 48), (64, 16), (128, 128))


def device_map(mask: Any, b: int, h: int, q_len: int, kv_len: int, blocks: Any = 128) -> DeviceMap:
    found = flexc.create_block_mask(mask, b, h, q_len, kv_len, device="cuda", BLOCK_SIZE=blocks).block_map
    assert isinstance(found, DeviceMap)
    return found


def host_map(mask: Any, b: int, h: int, q_len: int, kv_len: int, blocks: Any = 128) -> BlockMap:
    found = flexc.create_block_mask(mask, b, h, q_len, kv_len, device="cpu", BLOCK_SIZE=blocks).block_map
    assert isinstance(found, BlockMap)
    return found


def assert_same(built: DeviceMap, expected: BlockMap) -> None:
    offsets, walk = stretches(expected)
    np.testing.assert_array_equal(built.offsets.cpu().numpy(), offsets)
    np.testing.assert_array_equal(built.stretches[: offsets[-1]].cpu().numpy(), walk)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_mask_of_the_corpus(entry: Entry) -> None:
    blocks = BLOCKS[sum(map(ord, entry.name)) % len(BLOCKS)]
    lengths = [(entry.q_len, entry.kv_len)] + ([(1300, 1411)] if entry.scales else [])
    for q_len, kv_len in lengths:
        case = entry.make("cuda", lengths=(q_len, kv_len) if entry.scales else None)
        on_cpu = entry.make("cpu", lengths=(q_len, kv_len) if entry.scales else None)
        shape = (case.batch, case.heads, q_len, kv_len)
        built, expected = (
            device_map(case.mask, *shape, blocks=blocks),
            host_map(on_cpu.mask, *shape, blocks=blocks),
        )
        assert_same(built, expected)
        assert_same(transposed_on(built), expected.transpose())


@pytest.mark.parametrize("blocks", [(256, 64), (512, 128), (1000, 48)])
@pytest.mark.parametrize(
    "name", ["causal", "sliding_window", "prefix_lm_by_batch", "document_causal", "natten2d"]
)
def test_blocks_of_many_queries(name: str, blocks: tuple[int, int]) -> None:
    entry = corpus()[name]
    lengths = (2100, 2300) if entry.scales else None
    case, on_cpu = (entry.make(device, lengths=lengths) for device in ("cuda", "cpu"))
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    expected = host_map(on_cpu.mask, *shape, blocks=blocks)
    assert_same(device_map(case.mask, *shape, blocks=blocks), expected)


def documents(length: int, count: int, device: str = "cuda") -> torch.Tensor:
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    starts = torch.zeros(length, dtype=torch.int32)
    starts[cuts] = 1
    return starts.cumsum(0, dtype=torch.int32).to(device)


@pytest.mark.parametrize("shuffled", [False, True])
def test_documents(shuffled: bool) -> None:
    ids = documents(40_000, 12)
    if shuffled:
        ids = torch.where(torch.arange(40_000, device="cuda") // 700 % 2 == 0, ids, ids.flip(0))
    valid = torch.rand(40_000, device="cuda") < 0.999

    def both(ids: torch.Tensor, valid: torch.Tensor) -> Any:
        return masks.causal & masks.document(ids) & (lambda b, h, q_idx, kv_idx: valid[kv_idx])

    built = device_map(both(ids, valid), 1, 1, 40_000, 40_000)
    expected = host_map(both(ids.cpu(), valid.cpu()), 1, 1, 40_000, 40_000)
    assert_same(built, expected)
    assert_same(transposed_on(built), expected.transpose())


def test_nothing_synchronises() -> None:
    ids = documents(4096, 5)
    mask = masks.causal & masks.document(ids)
    q, k, v = torch.randn(3, 2, 4, 4096, 64, device="cuda", dtype=torch.bfloat16)
    flexc.attention(q, k, v, mask_mod=mask)  # compiles
    with no_synchronisation():
        ids.copy_(ids.flip(0))
        out = flexc.attention(q, k, v, mask_mod=mask)
        block_mask = flexc.create_block_mask(mask, None, None, 4096, 4096, device="cuda")
        with_map = flexc.attention(q, k, v, mask_mod=mask, block_mask=block_mask)
        transposed_on(device_map(mask, 1, 1, 4096, 4096))
    expected = golden(q, k, v, mask_mod=mask)
    expected.check(out)
    expected.check(with_map)


def test_a_graph_builds_the_map_anew_from_what_the_tensors_hold() -> None:
    ids = documents(2000, 5)
    mask = masks.causal & masks.document(ids)
    q, k, v = torch.randn(3, 1, 2, 2000, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the second one is prepared, and the graph must not use its map
        flexc.attention(q, k, v, mask_mod=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexc.attention(q, k, v, mask_mod=mask)
        again = flexc.attention(k, q, v, mask_mod=mask)
    for count in (1, 9, 40):
        ids.copy_(documents(2000, count))
        graph.replay()
        golden(q, k, v, mask_mod=mask).check(out)
        golden(k, q, v, mask_mod=mask).check(again)


def test_a_block_mask_made_inside_a_graph() -> None:
    limits = torch.tensor([700, 100], device="cuda")
    mask = masks.prefix_lm(limits)
    device_map(mask, 2, 1, 1000, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built = device_map(mask, 2, 1, 1000, 1000)
    for values in ([700, 100], [0, 1000], [511, 512]):
        limits.copy_(torch.tensor(values))
        graph.replay()
        assert_same(built, host_map(masks.prefix_lm(torch.tensor(values)), 2, 1, 1000, 1000))


def test_a_map_made_before_a_graph_serves_in_it() -> None:
    mask = masks.causal & masks.document(documents(2000, 5))
    block_mask = flexc.create_block_mask(mask, None, None, 2000, 2000, device="cuda")
    q, k, v = torch.randn(3, 1, 2, 2000, 64, device="cuda", dtype=torch.bfloat16)
    flexc.attention(q, k, v, mask_mod=mask, block_mask=block_mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexc.attention(q, k, v, mask_mod=mask, block_mask=block_mask)
    graph.replay()
    golden(q, k, v, mask_mod=mask).check(out)


def test_another_stream_waits_for_the_map() -> None:
    ids = documents(30_000, 5)
    mask = masks.document(ids)
    device_map(mask, 1, 1, 30_000, 30_000)
    expected = host_map(masks.document(ids.cpu().flip(0)), 1, 1, 30_000, 30_000)
    torch.cuda._sleep(50_000_000)
    ids.copy_(ids.flip(0))
    device_map(mask, 1, 1, 30_000, 30_000)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = device_map(mask, 1, 1, 30_000, 30_000)
        offsets, walk = found.offsets.clone(), found.stretches.clone()
    stream.synchronize()
    assert_same(DeviceMap(found.grid, offsets, walk), expected)


def test_a_long_causal_map_is_small() -> None:
    device_map(masks.causal, 1, 1, 1024, 1024)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    built = device_map(masks.causal, 1, 1, 131_072, 131_072)
    assert torch.cuda.max_memory_allocated() - before < 2 * 10**6
    assert built.host().counts() == (1024 * 1023 // 2, 1024, 1024 * 1023 // 2)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_too_many_pairs_inside_a_graph() -> None:
    order = torch.randperm(5000, device="cuda")

    def scattered(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (order[q_idx] * 31 + order[kv_idx] * 17) % 1009 < 3

    with pytest.raises(MaskTooOpen, match="budget"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flexc.create_block_mask(scattered, None, None, 5000, 5000, device="cuda", budget=1e6)
