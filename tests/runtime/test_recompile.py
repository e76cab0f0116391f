"""What compiles a new kernel, and what does not: lengths, strides, batches, captured values, maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexc
from flexc import build, execute, masks, statement
from flexc import resolve as resolved
from flexc.call import AttentionCall
from flexc.callspec import spec_of
from flexc.provenance import without_own_map
from flexc.resolve import resolve

OPTIONS = (("block_kv", 16), ("block_q", 16), ("num_stages", 1), ("num_warps", 4))


def _kernel(
    *,
    mask: Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    q_len: int = 40,
    kv_len: int = 50,
    heads: int = 4,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    dim: int = 16,
    **facts: Any,
) -> Any:
    """The kernel of a call, and how many were compiled for it."""
    q = torch.zeros(batch, heads, q_len, dim, dtype=dtype)
    k = torch.zeros(batch, 2, kv_len, dim, dtype=dtype)
    mods, values, block_map = resolve(score, mask, facts.pop("block_mask", None))
    call = AttentionCall(
        q=q, k=k, v=k, mods=mods, values=values, block_map=block_map,
        **{"scale": 0.25, "sinks": None, "return_lse": False, "out": None, "allow_tf32": False, **facts},
    )  # fmt: skip
    before = build.compilations
    kernel = build.kernel_for(spec_of(without_own_map(call)), "sm80", OPTIONS, mods.sources)
    return kernel, build.compilations - before


@pytest.fixture(autouse=True)
def _new(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Nothing is found in the cache or the process."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_built", {})
    monkeypatch.setattr(build, "_loaded", {})


def test_shapes_and_strides_do_not_compile() -> None:
    kernel, count = _kernel()
    assert count == 1
    for shapes in ({"q_len": 41}, {"kv_len": 1}, {"heads": 8}, {"batch": 3}, {"scale": 2.0}, {"q_len": 0}):
        assert _kernel(**shapes) == (kernel, 0)
    whole = torch.zeros(1, 50, 2, 16, dtype=torch.float16)
    assert _kernel(out=torch.zeros(1, 40, 4, 16, dtype=torch.float16).transpose(1, 2)) == (kernel, 0)
    assert whole.transpose(1, 2).stride(2) == 32


def test_new_closures_of_the_same_code_fill_no_cache() -> None:
    """Whatever is kept of a mod is kept once for all of them, with and without gradients."""
    for n in range(4):
        table, width = torch.randn(4, requires_grad=n >= 2), n + 1
        q = torch.randn(1, 4, 9, 4)
        out = flexc.attention(
            q,
            q,
            q,
            score_mod=lambda s, b, h, q_idx, kv_idx, table=table: s * table[h],
            mask_mod=flexc.masks.causal & flexc.masks.sliding_window(width),
        )
        if n >= 2:
            out.sum().backward()
        sizes = len(resolved._resolved), len(execute._texts), len(statement._texts)
        if n in (0, 2):
            first = sizes
        assert sizes == first


def test_captured_values_do_not_compile() -> None:
    window, factor, table = 5, 0.5, torch.zeros(9)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < window) & (q_idx >= kv_idx)

    def score(score, b, h, q_idx, kv_idx):
        return score * factor + table[q_idx % 9]

    kernel, count = _kernel(mask=mask, score=score)
    assert count == 1
    window, factor, table = 900, -2.5, torch.ones(700)
    assert _kernel(mask=mask, score=score) == (kernel, 0)
    table.fill_(3.0)
    assert _kernel(mask=mask, score=score, q_len=77) == (kernel, 0)


def test_another_closure_of_the_same_code_does_not_compile() -> None:
    kernel, count = _kernel(mask=masks.sliding_window(8))
    assert count == 1
    assert _kernel(mask=masks.sliding_window(100)) == (kernel, 0)
    documents = masks.document(torch.zeros(50, dtype=torch.int32))
    kernel, count = _kernel(mask=documents)
    assert count == 1
    assert _kernel(mask=masks.document(torch.arange(60, dtype=torch.int32)), kv_len=60) == (kernel, 0)


def test_block_maps_do_not_compile() -> None:
    def listed(block: int, mask: Callable[..., Any]) -> Any:
        return flexc.create_block_mask(mask, None, None, 40, 50, device="cpu", BLOCK_SIZE=block)

    kernel, count = _kernel(block_mask=listed(256, masks.causal))
    assert count == 1
    assert _kernel(block_mask=listed(512, masks.causal)) == (kernel, 0)
    assert _kernel(mask=masks.causal) == (kernel, 0)


def test_another_process_finds_it_on_disk() -> None:
    _, count = _kernel(mask=masks.causal)
    assert count == 1
    build._built.clear()  # what a new process starts with
    kernel, count = _kernel(mask=masks.causal)
    assert count == 0
    assert kernel.source


@pytest.mark.parametrize(
    "facts",
    [
        {"dim": 32},
        {"dtype": torch.bfloat16},
        {"return_lse": True},
        {"scale": -1.0},
        {"sinks": torch.zeros(4)},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_what_decides_the_code_compiles(facts: dict[str, Any]) -> None:
    first, _ = _kernel()
    kernel, count = _kernel(**facts)
    assert count == 1
    assert kernel.source != first.source or kernel.ptx != first.ptx


def test_other_captured_types_compile() -> None:
    def of(table: torch.Tensor) -> Callable[..., Any]:
        return lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]

    assert _kernel(score=of(torch.zeros(50)))[1] == 1
    assert _kernel(score=of(torch.zeros(60)))[1] == 0
    assert _kernel(score=of(torch.zeros(50, dtype=torch.float16)))[1] == 1
