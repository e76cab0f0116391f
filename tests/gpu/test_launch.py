"""Launching: saved kernels, graphs, streams, threads, devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import flexc
from flexc import build, masks
from tests.oracle import golden


def _qkv(length: int = 300, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 2, 4, length, dim, device="cuda", dtype=torch.bfloat16)
    return q, k, v


def _target() -> str:
    from flexc.codegen.target import target_for_capability

    return target_for_capability(*torch.cuda.get_device_capability()).name


def test_a_saved_kernel_runs_and_serves_attention_without_compiling(tmp_path: Path) -> None:
    slopes = torch.rand(4, device="cuda")

    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx) * 0.5

    made = flexc.compile(score_mod=bias, mask_mod=masks.causal, head_dim=64, target=_target())
    made.save(tmp_path / "kernel")
    before = build.compilations
    loaded = flexc.load(tmp_path / "kernel")
    q, k, v = _qkv()
    expected = golden(q, k, v, score_mod=bias, mask_mod=masks.causal)
    out, lse = loaded(q, k, v, captures={"slopes": slopes})
    assert lse is None
    expected.check(out)
    expected.check(made(q, k, v)[0])
    expected.check(flexc.attention(q, k, v, score_mod=bias, mask_mod=masks.causal))
    assert build.compilations == before


def test_a_call_is_captured_in_a_graph_and_replayed() -> None:
    q, k, v = _qkv()
    flexc.attention(q, k, v, mask_mod=masks.causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexc.attention(q, k, v, mask_mod=masks.causal)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    golden(q, k, v, mask_mod=masks.causal).check(out)


def test_streams_are_followed() -> None:
    q, k, v = _qkv()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.mul_(2)
        out = flexc.attention(q, k, v, mask_mod=masks.causal)
    stream.synchronize()
    golden(q, k, v, mask_mod=masks.causal).check(out)


def test_threads_share_kernels() -> None:
    inputs = [_qkv(length) for length in (100, 200, 300, 300)]

    def run(index: int) -> torch.Tensor:
        q, k, v = inputs[index % 4]
        with torch.no_grad():
            return flexc.attention(q, k, v, mask_mod=masks.causal)

    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(run, range(64)))
    for out, (q, k, v) in zip(outs, inputs, strict=False):
        golden(q, k, v, mask_mod=masks.causal).check(out)
    for index, out in enumerate(outs):
        assert torch.equal(out, outs[index % 4])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    q, k, v = (x.to("cuda:1") for x in _qkv())
    for _ in range(2):
        out = flexc.attention(q, k, v, mask_mod=masks.causal)
        golden(q, k, v, mask_mod=masks.causal).check(out)


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = _qkv(1000)
    outs = [flexc.attention(q, k, v, mask_mod=masks.sliding_window(100)) for _ in range(5)]
    assert all(torch.equal(outs[0], out) for out in outs)
