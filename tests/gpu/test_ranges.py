"""Kernels that compute their loop bounds, on the GPU: the golden's numbers, the map's bits, free lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexc
from flexc import build, masks
from flexc.codegen.blocks import exact_ranges
from flexc.resolve import resolve
from tests.gpu.inputs import random_qkv
from tests.gpu.synchronisation import no_synchronisation
from tests.mods import Entry, corpus
from tests.oracle import golden

Mask = Callable[..., Any]
OFFSETS = [0, 3, 400, 401, 401, 1500, 1970, 2000]


def _masks() -> dict[str, Mask]:
    def first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 20

    def falling(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= 1900 - q_idx) & (kv_idx < 2000 - q_idx)

    widths = torch.tensor([5, 500, 129, 1], device="cuda")

    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < widths[h])

    return {
        "causal": masks.causal,
        "window": masks.sliding_window(300),
        "prefix": masks.prefix_lm(700),
        "chunked": masks.chunked(333),
        "global_and_window": masks.causal & (masks.sliding_window(300) | first),
        "documents": masks.causal & masks.document_from_cu_seqlens(torch.tensor(OFFSETS, device="cuda")),
        "block_diffusion": masks.block_diffusion(1000, 37),
        "by_head": by_head,
        "not_causal": ~masks.causal,
        "three_ranges": masks.sliding_window(50) | falling | first,
    }


NAMES = (
    "causal", "window", "prefix", "chunked", "global_and_window", "documents", "block_diffusion", "by_head",
    "not_causal", "three_ranges",
)  # fmt: skip


def _both(
    mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: int
) -> list[tuple[torch.Tensor, ...]]:
    """Out and lse of the portable kernel, with computed loop bounds and from a block map."""
    with torch.no_grad():
        return [
            flexc.attention(q, k, v, mask_mod=mask, return_lse=True, backend="triton", options=each)
            for each in (options, {"blocks": "map", **options})
        ]


@pytest.mark.parametrize("lengths", [(2000, 2000), (777, 2000), (2000, 777), (1, 1999)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_numbers_and_the_bits_of_a_map(name: str, lengths: tuple[int, int]) -> None:
    mask = _masks()[name]
    assert exact_ranges(_graph(mask)) is not None
    q, k, v = random_qkv(*lengths)
    # For few rows the two have tiles of their own sizes, and so sums in another order, if nothing is said.
    computed, mapped = _both(mask, q, k, v, **({"block_kv": 32} if lengths[0] == 1 else {}))
    golden(q, k, v, mask_mod=mask).check(*computed)
    for one, other in zip(computed, mapped, strict=True):
        assert torch.equal(one, other)


def _graph(mask: Mask) -> Any:
    return resolve(None, mask)[0].mask


MASKED = [pytest.param(e, id=name) for name, e in corpus().items() if e.kind == "mask"]


@pytest.mark.parametrize("entry", MASKED)
def test_the_corpus_gives_the_bits_of_maps(entry: Entry) -> None:
    case = entry.make("cuda")
    assert case.mask is not None
    q = torch.randn(case.batch, case.heads, case.q_len, 64, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, case.batch, case.kv_heads, case.kv_len, 64, device="cuda", dtype=torch.float16)
    computed, mapped = _both(case.mask, q, k, v)
    for one, other in zip(computed, mapped, strict=True):
        assert torch.equal(one, other)


def test_other_lengths_and_contents_need_no_compilation_and_no_synchronisation() -> None:
    ends = torch.full((4096,), 4096, dtype=torch.int32, device="cuda")
    mask = masks.causal & (lambda b, h, q_idx, kv_idx: kv_idx < ends[q_idx])
    inputs = {length: random_qkv(length, length) for length in (128, 500, 1000, 4096)}
    flexc.attention(*inputs[128], mask_mod=mask, backend="triton")
    before = build.compilations
    with no_synchronisation():
        outs = {n: flexc.attention(*x, mask_mod=mask, backend="triton") for n, x in inputs.items()}
        ends.fill_(100)
        short = flexc.attention(*inputs[1000], mask_mod=mask, backend="triton")
    assert build.compilations == before
    for length, out in outs.items():
        golden(*inputs[length], mask_mod=masks.causal).check(out)
    golden(*inputs[1000], mask_mod=mask).check(short)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_captured_bound_may_change_between_replays_of_a_graph(backend: str) -> None:
    ends = torch.full((700,), 700, dtype=torch.int32, device="cuda")
    mask = masks.causal & (lambda b, h, q_idx, kv_idx: kv_idx < ends[q_idx])
    q, k, v = random_qkv(700, 700)
    flexc.attention(q, k, v, mask_mod=mask, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexc.attention(q, k, v, mask_mod=mask, backend=backend)
    for end in (700, 130, 1):
        ends.fill_(end)
        graph.replay()
        golden(q, k, v, mask_mod=mask).check(out)


def test_a_compiled_kernel_needs_no_block_mask() -> None:
    from flexc.codegen.target import target_for_capability

    target = target_for_capability(*torch.cuda.get_device_capability()).name
    window = masks.sliding_window(100)
    kernel = flexc.compile(mask_mod=window, head_dim=64, target=target, return_lse=True, backend="triton")
    for lengths in ((1000, 1000), (300, 777)):
        q, k, v = random_qkv(*lengths)
        golden(q, k, v, mask_mod=masks.sliding_window(100)).check(*kernel(q, k, v))
    with pytest.raises(flexc.FlexcError, match="takes no block mask"):
        kernel(q, k, v, block_mask=masks.causal.block_mask(1, 1, 300, 777, device="cuda"))


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_unseen_values_have_no_effect(poison: float, backend: str) -> None:
    q, k, v = random_qkv(2000, 2000)
    mask = flexc.mask_mod(_masks()["three_ranges"]) & (lambda b, h, q_idx, kv_idx: kv_idx < 1990)
    expected = golden(q, k, v, mask_mod=mask)
    clean = flexc.attention(q, k, v, mask_mod=mask, backend=backend)
    k[:, :, 1990:] = poison
    v[:, :, 1990:] = poison
    out = flexc.attention(q, k, v, mask_mod=mask, backend=backend)
    expected.check(out)
    if backend == "triton":  # the Hopper kernels compute such rows again, by another instruction
        assert torch.equal(out, clean)
