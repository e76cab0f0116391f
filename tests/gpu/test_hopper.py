"""The Hopper kernels on the GPU they are made for; what they share with others is tested beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc import masks, scores
from flexc.errors import LayoutMismatch, UnsupportedFeature
from flexc.execute import new_seed
from flexc.philox import kept
from tests.gpu.inputs import HOPPER_MODS, NEEDS_SM90, random_qkv
from tests.mods import corpus
from tests.oracle import golden

pytestmark = NEEDS_SM90


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        result: tuple[torch.Tensor, torch.Tensor] = flexc.attention(
            q, k, v, return_lse=True, backend="hopper", **arguments
        )
        golden(q, k, v, **arguments).check(*result)
    return result[0]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", HOPPER_MODS)
def test_mods(name: str, dim: int) -> None:
    case = corpus()[name].make("cuda")
    q, k, v = random_qkv(
        case.q_len, case.kv_len, batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, dim=dim
    )
    _check(q, k, v, mask_mod=case.mask, score_mod=case.score)


@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(40, 40), (72, 80), (96, 96), (160, 96), (192, 128), (192, 192), (256, 256), (64, 128), (128, 64)],
)
def test_head_dims(dim: int, dim_v: int) -> None:
    for mask in (None, masks.causal):
        _check(*random_qkv(700, 777, dim=dim, dim_v=dim_v, dtype=torch.float16), mask_mod=mask)


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 3000), (3000, 1), (129, 63), (127, 65), (5000, 5000)]
)
def test_lengths(q_len: int, kv_len: int) -> None:
    for mask in (None, masks.sliding_window(77)):
        _check(*random_qkv(q_len, kv_len, heads=3, kv_heads=1), mask_mod=mask)


def test_more_tiles_than_multiprocessors_of_uneven_length() -> None:
    q, k, v = random_qkv(2100, 2100, heads=24, kv_heads=8, dim=128)
    for mask in (None, masks.causal, masks.causal & masks.sliding_window(300)):
        out = _check(q, k, v, mask_mod=mask)
        again = flexc.attention(q, k, v, mask_mod=mask, backend="hopper")
        assert torch.equal(out, again)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1300, 1300), (1201, 300), (130, 1500)])
def test_products_in_turns(q_len: int, kv_len: int) -> None:
    """Warpgroups that pass over keys, or have no rows, take their turns too: others wait for them."""
    q, k, v = random_qkv(q_len, kv_len, heads=24, kv_heads=8, dim=64)
    for mask in (None, masks.causal, masks.prefix_lm(200)):
        out = _check(q, k, v, mask_mod=mask)
        for _ in range(5):
            assert torch.equal(out, flexc.attention(q, k, v, mask_mod=mask, backend="hopper"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [120.0, -120.0], ids=["growing", "falling"])
def test_largest_scores_that_grow_along_the_keys(first: float, dtype: torch.dtype) -> None:
    """Keys are walked from the last one on; scores differ by hundreds."""
    for kv_len in (700, 3000):
        q, k, v = random_qkv(300, kv_len, dim=128, dtype=dtype)
        q[..., 0] = torch.rand_like(q[..., 0]) * 40.0
        k[..., 0] = torch.linspace(first, 0.0, kv_len, device="cuda").to(dtype)
        for sinks in (None, torch.linspace(-1.0, 30.0, 4, device="cuda")):
            _check(q, k, v, sinks=sinks)


def test_keys_whose_scores_are_infinite_weigh_nothing() -> None:
    q, k, v = random_qkv(300, 1000, dim=128)
    q[..., 0] = q[..., 0].abs() + 1.0
    k[:, :, 500:, 0] = -torch.inf
    out = flexc.attention(q, k, v, backend="hopper")
    golden(q, k[:, :, :500], v[:, :, :500]).check(out)


@pytest.mark.parametrize(("q_len", "kv_len"), [(2100, 2100), (2001, 300), (130, 700)])
def test_narrow_windows_of_wide_heads(q_len: int, kv_len: int) -> None:
    q, k, v = random_qkv(q_len, kv_len, heads=12, kv_heads=4, dim=128)
    for width in (5, 128, 256):
        _check(q, k, v, mask_mod=masks.sliding_window(width))
    _check(q, k, v, mask_mod=masks.sliding_window(128), sinks=torch.randn(12, device="cuda"))


@pytest.mark.parametrize(("q_len", "kv_len"), [(2100, 2100), (2001, 300), (130, 700), (65, 9000)])
def test_walks(q_len: int, kv_len: int) -> None:
    """Narrow heads whose rows see few keys: windows, and a band that is moved."""
    q, k, v = random_qkv(q_len, kv_len, heads=12, kv_heads=4, dim=64, dim_v=56)
    near = masks.sliding_window(100)
    for mask in (
        *map(masks.sliding_window, (5, 64, 100, 128, 129, 256)),
        lambda b, h, i, j: near(b, h, i, j + 37 * h),
    ):
        out = _check(q, k, v, mask_mod=mask, sinks=torch.randn(12, device="cuda"))
        _check(q, k, v, mask_mod=mask, scale=-0.3)
        assert out.isfinite().all()


@pytest.mark.parametrize(("q_len", "kv_len"), [(700, 700), (130, 333)])
def test_walks_with_score_mods(q_len: int, kv_len: int) -> None:
    q, k, v = random_qkv(q_len, kv_len, heads=12, kv_heads=4, dim=64)
    slopes = torch.linspace(0.5, -0.5, 12, device="cuda")
    for width in (64, 100, 128):
        for score in (scores.softcap(30.0), scores.alibi(slopes), scores.softcap(5.0)):
            _check(q, k, v, score_mod=score, mask_mod=masks.sliding_window(width))


def test_walks_past_unseen_values() -> None:
    q, k, v = random_qkv(700, 900, heads=12, kv_heads=4, dim=64)
    want = golden(q, k, v, mask_mod=masks.sliding_window(128))
    k[:, :, 700:], v[:, :, 700:] = torch.nan, torch.nan
    want.check(*flexc.attention(q, k, v, mask_mod=masks.sliding_window(128), return_lse=True))


def test_strides_sinks_scales() -> None:
    whole = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    _check(q, k, v, mask_mod=masks.causal)
    _check(q[..., 8:40], k[..., 16:48], v[..., :24], sinks=torch.randn(4, device="cuda"))
    _check(q, k[:1].expand_as(k), v[:, :1].expand_as(v), mask_mod=masks.causal)
    for scale in (0.0, -0.3, 2.0):
        _check(q, k, v, mask_mod=masks.causal, scale=scale)
    with pytest.raises(UnsupportedFeature, match="16 bytes"):
        flexc.attention(q[..., 1:33], k[..., :32], v, backend="hopper")


def _seed(seed: int) -> int:
    """The seed of dropout that a call draws after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    drawn = int(new_seed(torch.device("cuda")))
    torch.manual_seed(seed)
    return drawn


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("p", [0.1, 0.75, 1.0])
def test_dropout(p: float, dim: int) -> None:
    q, k, v = random_qkv(300, 333, dim=dim)
    arguments: dict[str, Any] = {"mask_mod": masks.causal, "score_mod": scores.softcap(3.0), "dropout_p": p}
    expected = golden(q, k, v, dropout_seed=_seed(7), **arguments)
    out, lse = flexc.attention(q, k, v, return_lse=True, backend="hopper", **arguments)
    expected.check(out, lse)


@pytest.mark.parametrize("dim", [64, 128])
def test_backends_drop_the_same_weights(dim: int) -> None:
    """With one-hot values the output is the weights themselves."""
    q, k, _ = random_qkv(1000, dim, heads=4, kv_heads=2, dim=dim)
    v = torch.eye(dim, device="cuda", dtype=torch.bfloat16).expand(2, 2, dim, dim).contiguous()
    seed = _seed(3)
    out = flexc.attention(q, k, v, dropout_p=0.3, backend="hopper")
    torch.manual_seed(3)
    portable = flexc.attention(q, k, v, dropout_p=0.3, backend="triton")
    stream = torch.arange(8).view(2, 4, 1, 1)
    keep = kept(seed, 0.3, stream, torch.arange(1000).view(1000, 1), torch.arange(dim))
    assert torch.equal((out != 0).cpu(), keep)
    assert torch.equal(out != 0, portable != 0)
    torch.testing.assert_close(out, portable)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_keys_and_values_that_no_row_sees_have_no_effect(poison: float, dim: int) -> None:
    q, k, v = random_qkv(300, 333, dim=dim)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx)

    expected = golden(q, k, v, mask_mod=even)
    k[:, :, 1::2] = poison
    v[:, :, 1::2] = poison
    out, lse = flexc.attention(q, k, v, mask_mod=even, backend="hopper", return_lse=True)
    expected.check(out, lse)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("score", [None, scores.softcap(30.0)], ids=["none", "soft_cap"])
def test_a_row_with_one_key_is_its_value(score: Any, dim: int) -> None:
    q, k, v = random_qkv(500, 500, dim=dim)
    out = flexc.attention(q, k, v, mask_mod=masks.causal, score_mod=score, backend="hopper")
    values = v[:, :, 0].repeat_interleave(2, 1)
    assert torch.equal(out[:, :, 0], values), "its weight is 1, which no rounding changes"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0, 60.0, -30.0])
@pytest.mark.parametrize("mask", [masks.causal, masks.sliding_window(200)], ids=["causal", "window"])
def test_scores_that_a_cap_holds_near_zero(mask: Any, cap: float, dim: int) -> None:
    for larger in (1.0, 30.0):
        q, k, v = random_qkv(700, 700, dim=dim)
        _check(q * larger, k, v, mask_mod=mask, score_mod=scores.softcap(cap))


@pytest.mark.parametrize("dim", [64, 128])
def test_weights_that_overflow_with_large_values(dim: int) -> None:
    q, k, v = random_qkv(700, 700, dim=dim)
    _check(q * 30, k, v.abs() * 1e25, mask_mod=masks.causal, score_mod=scores.softcap(30.0))
    _check(q * 30, k, v * 1e-25, mask_mod=masks.causal, score_mod=scores.softcap(30.0))
    v[:, :, 0] = float("inf")
    _check(q, k, v.abs(), mask_mod=masks.causal, score_mod=scores.softcap(30.0))


def test_distances_far_from_the_start() -> None:
    q, k, v = random_qkv(128, 40000, batch=1, heads=2, kv_heads=1)

    def late(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + 0.01 * (kv_idx - q_idx)

    def last(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= 39000) & (kv_idx - q_idx < 39990 - 127)

    _check(q, k, v, score_mod=late, mask_mod=last)


@pytest.mark.parametrize("dim", [64, 128])
def test_slopes_that_promise_larger_scores_than_rows_see(dim: int) -> None:
    slopes = torch.tensor([-1.0, -3.0, 0.5, -0.3], device="cuda")
    for mask in (masks.causal, masks.sliding_window(400)):
        _check(
            *random_qkv(1000, 1000, heads=4, kv_heads=4, dim=dim),
            mask_mod=mask,
            score_mod=scores.alibi(slopes),
        )


def test_repeated_calls_find_their_tensors() -> None:
    for n in range(4):
        q, k, v = random_qkv(500, 500)
        held = [torch.empty(1 << (20 + n), device="cuda")]
        _check(q, k, v, mask_mod=masks.causal, score_mod=scores.softcap(3.0))
        _check(q, k, v, mask_mod=masks.causal, score_mod=scores.softcap(3.0))
        held.clear()


def test_streams_and_graphs() -> None:
    q, k, v = random_qkv(2100, 2100, heads=24, kv_heads=8, dim=128)
    expected = flexc.attention(q, k, v, mask_mod=masks.causal, backend="hopper")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            outs.append(flexc.attention(q, k, v, mask_mod=masks.causal, backend="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flexc.attention(q, k, v, mask_mod=masks.causal, backend="hopper")
    for _ in range(3):
        captured.zero_()
        graph.replay()
        beside = flexc.attention(q, k, v, mask_mod=masks.causal, backend="hopper")
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
        assert torch.equal(beside, expected)


def test_a_compiled_kernel_is_called() -> None:
    kernel = flexc.compile(mask_mod=masks.causal, head_dim=64, return_lse=True, backend="hopper")
    q, k, v = random_qkv(300, 333)
    out, lse = kernel(q, k, v)
    golden(q, k, v, mask_mod=masks.causal).check(out, lse)
    assert torch.equal(kernel(q.mT.contiguous().mT, k, v)[0], out)
    with pytest.raises(LayoutMismatch, match="16 bytes"):
        kernel(q, torch.randn(2, 2, 333, 68, device="cuda", dtype=torch.bfloat16)[..., :64], v)
    assert kernel(q[:, :, :0], k, v)[0].shape == (2, 4, 0, 64)
    nothing, sums = kernel(q, k[:, :, :0], v[:, :, :0])
    assert sums is not None
    assert (nothing == 0).all()
    assert (sums == -torch.inf).all()


def test_a_compiled_kernel_drops_the_weights_that_attention_drops() -> None:
    kernel = flexc.compile(mask_mod=masks.causal, head_dim=64, dropout=True, backend="hopper")
    q, k, v = random_qkv(300, 333)
    torch.manual_seed(3)
    out, _ = kernel(q, k, v, dropout_p=0.25)
    torch.manual_seed(3)
    expected = flexc.attention(q, k, v, mask_mod=masks.causal, dropout_p=0.25, backend="hopper")
    assert torch.equal(out, expected)
