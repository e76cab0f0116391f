"""`flexc explain`."""

from __future__ import annotations

from flexc.cli.options import Batch, BlockSize, Dtype, DtypeOption, Head, HeadDim, KvLen, Mod, QLen, Target
from flexc.cli.show import show_text
from flexc.compiling import compile as compile_kernel
from flexc.errors import FlexcError, InternalError
from flexc.explain import explain_mask, explain_score
from flexc.modfile import load_one


def explain(
    mod: Mod,
    q_len: QLen = 4096,
    kv_len: KvLen = 4096,
    b: Batch = 0,
    h: Head = 0,
    block_size: BlockSize = 128,
    target: Target = "sm90",
    head_dim: HeadDim = 128,
    dtype: DtypeOption = Dtype.BF16,
) -> None:
    """The traced formula, the tiles at these lengths, and every decision about the kernel with its reason."""
    named = load_one(mod)
    parts = []
    if named.mask is not None:
        parts.append(explain_mask(named.mask, q_len, kv_len, b=b, h=h, block_size=block_size))
    if named.score is not None:
        parts.append(explain_score(named.score))
    try:
        kernel = compile_kernel(
            mask_mod=named.mask,
            score_mod=named.score,
            head_dim=head_dim,
            dtype=dtype.torch,
            target=target,
            backward=False,
        )
        parts.append(kernel.explain())
    except (FlexcError, InternalError) as error:  # the rest is as true without a kernel
        what = f"forward for {target}, head dimension {head_dim}, {dtype.value}"
        parts.append(f"no kernel: {what} failed: {type(error).__name__}, see below")
        show_text("\n\n".join(parts))
        raise
    show_text("\n\n".join(parts))
