"""The block-sparse CPU backend against the fp64 golden, and its memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flexc
from flexc import BlockMask, create_block_mask
from tests.oracle import golden

ROOT = Path(__file__).parents[2]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)


def gaps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx // 64) % 2 == (q_idx // 128) % 2


def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (b % 2 == 0)


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + h) % 3 <= kv_idx % (h + 2)


def odd_rows_empty(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 2 == 0) & (kv_idx >= q_idx)


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 0


def late_first_block(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Row 100 sees nothing of the first block that its tile visits."""
    return ((q_idx < 100) & (kv_idx < 30)) | ((q_idx >= 100) & (kv_idx >= 140))


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * (h + 1) * abs(q_idx - kv_idx)


def not_the_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, 0.0, -float("inf"))


MASKS = [None, causal, window, gaps, by_batch, by_head, odd_rows_empty, nothing, late_first_block]


def _qkv(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, dim_v: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, heads, q_len, dim).to(dtype),
        torch.randn(batch, kv_heads, kv_len, dim).to(dtype),
        torch.randn(batch, kv_heads, kv_len, dim_v).to(dtype),
    )


def _attention(*args: Any, **options: Any) -> Any:
    return flexc.attention(*args, backend="cpu", **options)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The result of the backend, after it was compared with the golden."""
    out, lse = _attention(q, k, v, return_lse=True, **options)
    assert out.dtype is q.dtype
    assert lse.dtype is (torch.float64 if q.dtype is torch.float64 else torch.float32)
    golden(q, k, v, **options).check(out, lse)
    result: torch.Tensor = out
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: getattr(m, "__name__", "none"))
def test_masks_and_dtypes(mask: Callable[..., Any] | None, dtype: torch.dtype) -> None:
    q, k, v = _qkv(2, 4, 2, 190, 201, 24, 17, dtype)
    _check(q, k, v, mask_mod=mask)
    _check(q, k, v, mask_mod=mask, score_mod=alibi, sinks=torch.randn(4), scale=0.3)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 12, 2, 1, 333, 64, 64),
        (1, 28, 4, 1, 130, 31, 31),
        (2, 28, 4, 37, 70, 8, 72),
        (3, 2, 2, 129, 64, 1, 1),
        (1, 64, 1, 20, 90, 16, 16),
        (1, 2, 1, 100, 100, 192, 128),
        (1, 1, 1, 17, 40, 512, 512),
        (0, 2, 2, 5, 5, 8, 8),
        (2, 2, 1, 0, 5, 8, 8),
        (2, 2, 1, 5, 0, 8, 4),
    ],
)
def test_shapes(shape: tuple[int, ...]) -> None:
    batch, heads, kv_heads, q_len, kv_len, dim, dim_v = shape
    q, k, v = _qkv(batch, heads, kv_heads, q_len, kv_len, dim, dim_v, torch.float32)
    for mask in (None, causal):
        _check(q, k, v, mask_mod=mask)
        _check(q, k, v, mask_mod=mask, score_mod=alibi, sinks=torch.randn(heads))


def test_kv_of_a_lower_precision() -> None:
    q, k, v = _qkv(1, 4, 2, 70, 80, 16, 16, torch.float32)
    out = _attention(q, k.bfloat16(), v.half(), mask_mod=causal)
    golden(q, k.bfloat16().float(), v.half().float(), mask_mod=causal).check(out)


def test_a_score_mod_that_ignores_the_score() -> None:
    q, k, v = _qkv(1, 2, 2, 70, 70, 16, 16, torch.float32)
    out = _check(q, k, v, score_mod=not_the_score)
    means = v.cumsum(2) / torch.arange(1, 71).view(-1, 1)
    torch.testing.assert_close(out, means)


def test_whole_tiles_and_single_rows_without_keys() -> None:
    q, k, v = _qkv(1, 2, 1, 300, 300, 16, 16, torch.float32)
    keys = torch.zeros(300, dtype=torch.bool)
    keys[[5, 290]] = True

    def some_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return keys[q_idx] & (kv_idx <= q_idx)

    for sinks in (None, torch.tensor([0.5, -math.inf])):
        out, lse = _attention(q, k, v, mask_mod=some_rows, sinks=sinks, return_lse=True)
        golden(q, k, v, mask_mod=some_rows, sinks=sinks).check(out, lse)
        assert (out[:, :, ~keys] == 0).all()
        empty = -math.inf if sinks is None else sinks.view(2, 1)
        assert (lse[0][:, ~keys] == empty).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_keys_and_values_that_no_row_sees(poison: float) -> None:
    q, k, v = _qkv(2, 4, 2, 100, 200, 16, 16, torch.float32)
    seen = torch.ones(200, dtype=torch.bool)
    seen[[3, 64, 65, 130]] = False
    seen[150:] = False

    def some_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return seen[kv_idx]

    expected = _attention(q, k, v, mask_mod=some_keys, return_lse=True)
    k[:, :, ~seen] = poison
    v[:, :, ~seen] = poison
    for score in (None, lambda score, b, h, q_idx, kv_idx: score * 1.0):
        actual = _attention(q, k, v, mask_mod=some_keys, score_mod=score, return_lse=True)
        torch.testing.assert_close(actual, expected)


def test_a_value_that_some_rows_see_spoils_only_these() -> None:
    q, k, v = _qkv(1, 2, 1, 100, 100, 16, 16, torch.float32)
    expected = _attention(q, k, v, mask_mod=causal)
    v[:, :, 70, 3] = math.nan
    k[:, :, 80] = math.nan
    out = _attention(q, k, v, mask_mod=causal)
    torch.testing.assert_close(out[:, :, :70], expected[:, :, :70])
    assert out[:, :, 70:, 3].isnan().all()
    others = [i for i in range(16) if i != 3]
    torch.testing.assert_close(out[:, :, 70:80][..., others], expected[:, :, 70:80][..., others])
    assert out[:, :, 80:].isnan().all()


def test_masked_lanes_do_not_read_out_of_range() -> None:
    rel_bias = torch.randn(2, 4, 256, 32)

    def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 32)

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + rel_bias[b, h, q_idx, q_idx - kv_idx]

    q, k, v = _qkv(2, 4, 4, 256, 256, 16, 16, torch.float32)
    _check(q, k, v, mask_mod=band, score_mod=relative)


def test_strides_are_read_in_place() -> None:
    q, k, v = _qkv(1, 2, 2, 60, 256, 16, 16, torch.float32)
    _check(q, k, v, mask_mod=causal)
    _check(q, k[:, :, :-128], v[:, :, :-128], mask_mod=causal)
    packed = torch.randn(2, 60, 3, 4, 16)
    _check(*packed.permute(2, 0, 3, 1, 4), mask_mod=causal)


def test_a_mask_that_reads_a_table_of_the_batch() -> None:
    for batch in (3, 2):
        cutoff = torch.tensor([10, 77, 150])[:batch]

        def limited(b: Any, h: Any, q_idx: Any, kv_idx: Any, cutoff: torch.Tensor = cutoff) -> Any:
            return (kv_idx <= q_idx) & (kv_idx < cutoff[b])

        q, k, v = _qkv(batch, 2, 1, 150, 150, 16, 16, torch.float32)
        _check(q, k, v, mask_mod=limited)


def test_a_kv_length_that_grows_token_by_token() -> None:
    _, k, v = _qkv(1, 4, 2, 1, 140, 16, 16, torch.float32)
    for length in range(120, 140):
        q = torch.randn(1, 4, 1, 16)

        def last(b: Any, h: Any, q_idx: Any, kv_idx: Any, position: int = length - 1) -> Any:
            return (kv_idx <= q_idx + position) & (kv_idx > q_idx + position - 70)

        _check(q, k[:, :, :length], v[:, :, :length], mask_mod=last)


def test_padding_by_a_table_of_batch_and_row() -> None:
    padded = torch.rand(3, 100) < 0.3
    q, k, v = _qkv(3, 4, 2, 100, 100, 16, 16, torch.float32)

    def valid(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~padded[b, q_idx] & ~padded[b, kv_idx] & (q_idx >= kv_idx)

    _check(q, k, v, mask_mod=valid)
    blocks = create_block_mask(valid, 3, None, 100, 100, device="cpu", BLOCK_SIZE=64)
    _check(q, k, v, block_mask=blocks.to_torch())


@pytest.mark.parametrize("heads", [(32, 32), (32, 4)])
def test_masks_of_many_heads(heads: tuple[int, int]) -> None:
    q, k, v = _qkv(1, *heads, 70, 70, 8, 8, torch.float32)

    def windows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= h)

    _check(q, k, v, mask_mod=windows)


@pytest.mark.parametrize("block_size", [16, 64, 100, 256, (64, 32), (32, 128)])
def test_block_sizes(block_size: int | tuple[int, int]) -> None:
    q, k, v = _qkv(2, 4, 2, 100, 230, 16, 16, torch.float32)
    for mask in (causal, by_head, gaps):
        blocks = create_block_mask(mask, 2, 4, 100, 230, device="cpu", BLOCK_SIZE=block_size)
        _check(q, k, v, block_mask=blocks)
        torch.testing.assert_close(_attention(q, k, v, block_mask=blocks), _attention(q, k, v, mask_mod=mask))


def test_partial_or_full_and_the_order_of_the_lists_do_not_change_a_bit() -> None:
    q, k, v = _qkv(1, 2, 2, 128, 512, 16, 16, torch.float32)

    def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= 0

    def listed(order: list[int], full: int) -> Any:
        """The blocks in this order, the last `full` of them as full."""
        split = len(order) - full
        lists = [torch.zeros(1, 1, 1, 8, dtype=torch.int32) for _ in range(2)]
        for target, blocks in zip(lists, (order[:split], order[split:]), strict=True):
            target[..., : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        counts = [torch.full((1, 1, 1), n, dtype=torch.int32) for n in (split, full)]
        mask = BlockMask.from_kv_blocks(
            counts[0], lists[0], counts[1], lists[1], (128, 64), everything, seq_lengths=(128, 512)
        )
        return _attention(q, k, v, block_mask=mask, return_lse=True)

    expected = listed([0, 1, 2, 4, 6, 7], 0)
    for order, full in (([7, 0, 4, 2, 6, 1], 0), ([0, 1, 2, 4, 6, 7], 6), ([4, 7, 0, 6, 1, 2], 3)):
        for actual, wanted in zip(listed(order, full), expected, strict=True):
            assert torch.equal(actual, wanted)


def test_a_block_mask_and_mods_apply_together() -> None:
    q, k, v = _qkv(1, 2, 2, 200, 200, 16, 16, torch.float32)
    blocks = create_block_mask(gaps, None, None, 200, 200, device="cpu", BLOCK_SIZE=64)
    _check(q, k, v, block_mask=blocks, mask_mod=causal)
    _check(q, k, v, block_mask=blocks, score_mod=not_the_score)

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal(b, h, q_idx, kv_idx) & gaps(b, h, q_idx, kv_idx)

    torch.testing.assert_close(
        _attention(q, k, v, block_mask=blocks, mask_mod=causal), _attention(q, k, v, mask_mod=both)
    )


def test_the_output_is_written_in_place() -> None:
    q, k, v = _qkv(1, 2, 2, 150, 150, 16, 16, torch.float32)
    buffer = torch.full((1, 150, 2, 16), math.nan)
    out = _attention(q, k, v, mask_mod=causal, out=buffer.transpose(1, 2))
    assert out.data_ptr() == buffer.data_ptr()
    golden(q, k, v, mask_mod=causal).check(buffer.transpose(1, 2))


def test_values_of_another_head_dimension_at_10000() -> None:
    q, k, v = _qkv(1, 8, 4, 10_000, 10_000, 64, 128, torch.float32)
    out = _attention(q, k, v, mask_mod=window)
    assert out.shape == (1, 8, 10_000, 128)
    rows = slice(9_900, 10_000)  # the golden of the last rows, which see the last 139 keys
    expected = golden(
        q[:, :, rows],
        k[:, :, 9_861:],
        v[:, :, 9_861:],
        mask_mod=lambda b, h, q_idx, kv_idx: window(b, h, q_idx + 9_900, kv_idx + 9_861),
    )
    expected.check(out[:, :, rows])


def test_autocast_and_inference_mode() -> None:
    q, k, v = _qkv(1, 8, 8, 700, 700, 32, 32, torch.float32)
    expected = _attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask_mod=causal)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert torch.equal(_attention(q, k.bfloat16(), v, mask_mod=causal), expected)
        short = _attention(q[:, :, :50], k[:, :, :50], v[:, :, :50], mask_mod=causal)
        torch.testing.assert_close(short, expected[:, :, :50])


MEMORY = """
import torch, flexc
window, length, limit = {window}, {length}, {limit}
torch.set_num_threads(2)

def mask(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
out = torch.empty_like(q)
short = (x[:, :, :2048] for x in (q, k, v, out))
flexc.attention(*list(short)[:3], mask_mod=mask, return_lse=True)
out.zero_()
before = peak()
flexc.attention(q, k, v, mask_mod=mask, out=out, return_lse=True)
used = peak() - before
assert used < limit, f"{{used}} bytes, allowed {{limit}}"
assert out.isfinite().all() and (out != 0).any()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
@pytest.mark.parametrize(("window", "length"), [(1024, 16_384), (512, 40_320), (5, 25_000)])
def test_memory_is_linear_in_the_length(window: int, length: int) -> None:
    """Beside its arguments a call needs less than one more tensor like q; the scores alone are over 1 GB."""
    script = MEMORY.format(window=window, length=length, limit=2 * length * 64 * 4)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
