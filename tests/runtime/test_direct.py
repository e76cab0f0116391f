"""Calls of a compiled kernel: what it can't serve is refused before a launch, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc import masks
from flexc.capture_fit import check_captures_fit
from flexc.direct import check_fits, check_map_fits, check_numbers_fit, check_target, run_kernel, without_keys
from flexc.errors import (
    BlockMaskMismatch,
    DeviceMismatch,
    FlexcError,
    LayoutMismatch,
    NotDifferentiable,
    ShapeMismatch,
    UnsupportedDtype,
    UnsupportedFeature,
    UnsupportedHeadDim,
    UnsupportedTarget,
)
from flexc.kernel import Kernel

BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=["hopper", "triton"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """One of each design, for rows at multiples of 16 bytes."""
    return flexc.compile(head_dim=64, head_dim_v=128, backend=request.param)


def _qkv(**changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = {
        "q": torch.zeros(2, 4, 30, 64, dtype=BF16),
        "k": torch.zeros(2, 2, 40, 64, dtype=BF16),
        "v": torch.zeros(2, 2, 40, 128, dtype=BF16),
    } | changes
    return given["q"], given["k"], given["v"]


def _refused(
    kernel: Kernel, kind: type[FlexcError], message: str, hint: str, **changes: torch.Tensor
) -> None:
    with pytest.raises(kind) as caught:
        check_fits(kernel.artifact, *_qkv(**changes), None)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("asking", ["q", "k", "v", "sinks", "captured"])
def test_gradients_that_would_not_be_recorded(kernel: Kernel, asking: str) -> None:
    """They used to be dropped without a word."""
    given = dict(zip("qkv", _qkv(), strict=True)) | {"sinks": torch.zeros(4), "captured": torch.zeros(4)}
    given[asking].requires_grad_()

    def run() -> None:
        run_kernel(
            kernel,
            *(given[name] for name in "qkv"),
            values=(given["captured"],),
            block_map=None,
            scale=1.0,
            sinks=given["sinks"],
        )

    with pytest.raises(NotDifferentiable, match="records none") as caught:
        run()
    assert "flexc.attention" in (caught.value.hint or "")
    with torch.no_grad(), pytest.raises(DeviceMismatch):  # as without gradients: there is no GPU
        run()


def test_positions_that_floats_would_round(kernel: Kernel) -> None:
    one = torch.zeros(1, 1, 1, 128, dtype=BF16)
    long = {"k": one[..., :64].expand(2, 2, 2**23, 64), "v": one.expand(2, 2, 2**23, 128)}
    _refused(kernel, ShapeMismatch, "positions below 8388608", "flexc.attention", **long)
    short = {name: x[:, :, : 2**23 - 1] for name, x in long.items()}
    check_fits(kernel.artifact, *_qkv(**short), None)


def test_tensors_that_fit(kernel: Kernel) -> None:
    check_fits(kernel.artifact, *_qkv(), None)
    whole = torch.zeros(2, 40, 3, 4, 64, dtype=BF16)
    check_fits(kernel.artifact, *_qkv(q=whole[:, :, 0].transpose(1, 2)), None)
    check_fits(kernel.artifact, *_qkv(k=torch.zeros(2, 2, 0, 64, dtype=BF16)), None)
    check_fits(kernel.artifact, *_qkv(k=torch.zeros(1, 2, 40, 64, dtype=BF16).expand(2, 2, 40, 64)), None)


def test_tensors_that_do_not(kernel: Kernel) -> None:
    narrow, wide = torch.zeros(2, 2, 40, 56, dtype=BF16), torch.zeros(2, 2, 40, 72, dtype=BF16)
    _refused(
        kernel, UnsupportedHeadDim, "made for q and k of head_dim 64, not 56", "head_dim=", q=narrow, k=narrow
    )
    _refused(kernel, UnsupportedHeadDim, "made for v of head_dim 128, not 72", "head_dim_v=", v=wide)
    _refused(
        kernel, UnsupportedDtype, "k of type bf16, not torch.float16", "", k=torch.zeros(2, 2, 40, 64).half()
    )
    shifted = wide[..., 4:68]
    _refused(kernel, LayoutMismatch, "starts 8 bytes past one", "k.contiguous() or k.clone()", k=shifted)
    ragged = torch.zeros(2, 2, 40, 68, dtype=BF16)[..., :64]
    _refused(kernel, LayoutMismatch, "k has strides (5440, 2720, 68, 1)", "flexc.attention", k=ragged)


def test_sinks() -> None:
    made = {takes: flexc.compile(head_dim=64, head_dim_v=128, sinks=takes) for takes in (False, True)}
    sinks = torch.zeros(4)
    check_fits(made[True].artifact, *_qkv(), sinks)
    with pytest.raises(UnsupportedFeature, match="compiled without sinks"):
        check_fits(made[False].artifact, *_qkv(), sinks)
    with pytest.raises(UnsupportedFeature, match="takes sinks"):
        check_fits(made[True].artifact, *_qkv(), None)
    with pytest.raises(ShapeMismatch, match=r"sinks has shape \(3,\)"):
        check_fits(made[True].artifact, *_qkv(), sinks[:3])


def test_dropout_and_scale(kernel: Kernel) -> None:
    drops = flexc.compile(head_dim=64, dropout=True)
    check_numbers_fit(kernel.artifact, 0.125, 0.0)
    check_numbers_fit(drops.artifact, 0.125, 0.1)
    with pytest.raises(UnsupportedFeature, match="compiled without dropout") as caught:
        check_numbers_fit(kernel.artifact, 0.125, 0.1)
    assert "flexc.compile(..., dropout=True)" in (caught.value.hint or "")
    with pytest.raises(UnsupportedFeature, match="compiled with dropout"):
        check_numbers_fit(drops.artifact, 0.125, 0.0)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(UnsupportedFeature, match="scales above 0"):
            check_numbers_fit(kernel.artifact, scale, 0.0)


def test_captures() -> None:
    """A loaded kernel is given captures by name, which may be others than those it was compiled with."""
    table = torch.zeros(4, 64)
    size = 16

    @flexc.score_mod
    def biased(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx % size]

    artifact = flexc.compile(score_mod=biased, head_dim=64).artifact
    fitting: dict[str, torch.Tensor | float] = {"table": torch.ones(4, 32), "size": 8}

    def check(**changes: Any) -> None:
        given = fitting | changes
        check_captures_fit(artifact, tuple(given[c.name] for c in artifact.captures))

    check()
    check(table=torch.ones(32, 2).T.contiguous())
    with pytest.raises(LayoutMismatch, match=r"'table' with a last dimension that is contiguous") as caught:
        check(table=torch.ones(64, 4).T)
    assert "table.contiguous()" in (caught.value.hint or "")
    with pytest.raises(UnsupportedDtype, match=r"'table' of type fp32, not torch\.float16"):
        check(table=torch.ones(4, 32).half())
    with pytest.raises(ShapeMismatch, match=r"2 dimension\(s\), not of shape \(32,\)"):
        check(table=torch.ones(32))
    with pytest.raises(UnsupportedDtype, match="for a tensor 'table', not the number 3"):
        check(table=3)
    with pytest.raises(UnsupportedDtype, match=r"'size' of type i32, which 0\.5 is not"):
        check(size=0.5)
    with pytest.raises(UnsupportedDtype, match="for a number 'size', not a tensor"):
        check(size=torch.tensor(3))


def test_block_masks(kernel: Kernel) -> None:
    q, k, _ = _qkv()
    found = masks.causal.block_mask(None, None, 30, 40, device="cpu").block_map
    check_map_fits(kernel.artifact, q, k, None)
    with pytest.raises(BlockMaskMismatch, match="takes no block mask"):
        check_map_fits(kernel.artifact, q, k, found)
    walks = flexc.compile(mask_mod=masks.causal, head_dim=64, head_dim_v=128, options={"blocks": "map"})
    check_map_fits(walks.artifact, q, k, found)
    with pytest.raises(BlockMaskMismatch, match="visits the blocks of a block mask"):
        check_map_fits(walks.artifact, q, k, None)


def test_targets() -> None:
    for made_for, there in (("sm90", "sm90"), ("sm80", "sm86"), ("sm86", "sm89"), ("sm120", "sm120")):
        check_target(made_for, there)
    for made_for, there in (("sm80", "sm90"), ("sm86", "sm80"), ("sm100", "sm103"), ("sm90", "sm100")):
        with pytest.raises(UnsupportedTarget) as caught:
            check_target(made_for, there)
        assert f"compiled for {made_for}, and the tensors are on a GPU of {there}" in caught.value.message
        assert there in (caught.value.hint or "")


@pytest.mark.parametrize("with_sinks", [False, True])
def test_without_keys(with_sinks: bool) -> None:
    """The same as the reference says."""
    q, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 0, 5)
    arguments: dict[str, Any] = {"sinks": torch.randn(4)} if with_sinks else {}
    out, lse = without_keys(q, v, arguments.get("sinks"), lse=True)
    expected = flexc.attention(
        q, v.new_zeros(2, 2, 0, 8), v, return_lse=True, backend="reference", **arguments
    )
    assert lse is not None
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert without_keys(q, v, None, lse=False)[1] is None
