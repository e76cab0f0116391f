"""`flex_attention` with the signature and the results of PyTorch's, computed by flexc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexc.api import attention
from flexc.check import check_is_tensor
from flexc.errors import BlockMaskMismatch, ShapeMismatch, UnknownOption, UnsupportedFeature

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from flexc.block_mask import BlockMask

ScoreFunction = Callable[..., Any]

# PyTorch's options tune its own kernels; none of them changes a result. flexc plans by itself.
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
_HINTS = frozenset(
    {
        "BACKEND",
        "BLOCKS_ARE_CONTIGUOUS",
        "BLOCK_M",
        "BLOCK_M1",
        "BLOCK_M2",
        "BLOCK_N",
        "BLOCK_N1",
        "BLOCK_N2",
        "FORCE_USE_FLEX_ATTENTION",
        "PRESCALE_QK",
        "ROWS_GUARANTEED_SAFE",
        "USE_TMA",
        "WRITE_DQ",
        "kpack",
        "matrix_instr_nonkdim",
        "num_stages",
        "num_warps",
        "waves_per_eu",
    }
)


class AuxRequest(NamedTuple):
    """Which results `flex_attention` returns beside the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The results that were asked for, None for the others. `lse` (B, Hq, L) fp32, natural logarithm."""

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]:
    """Drop-in for `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: (B, Hq, L, E).
        key: (B or 1, Hkv, S, E).
        value: (B or 1, Hkv, S, Ev).
        score_mod: `f(score, b, h, q_idx, kv_idx) -> score`.
        block_mask: of `create_block_mask`, flexc's or PyTorch's; its lengths must be the tensors'.
        scale: of the scores; `1 / sqrt(E)` by default.
        enable_gqa: allow fewer key heads than query heads.
        return_lse: also return lse (B, Hq, L); PyTorch deprecates it for `return_aux`.
        kernel_options: PyTorch's options; they tune its kernels and change nothing here.
        return_aux: which further results to return, as an `AuxOutput`.

    Returns:
        out (B, Hq, L, Ev); `(out, lse)` with `return_lse`; `(out, AuxOutput)` with `return_aux`.

    Raises:
        FlexcError: one subclass a mistake, each also a ValueError or NotImplementedError as in PyTorch; an
            unknown kernel option is a mistake.
    """
    _check_options(kernel_options)
    if return_lse and return_aux is not None:
        raise UnknownOption(
            "return_lse and return_aux are both given", hint="write return_aux=AuxRequest(lse=True) only"
        )
    if return_aux is not None and return_aux.max_scores:
        raise UnsupportedFeature(
            "return_aux asks for max_scores, which this version does not compute",
            hint="ask for lse, or leave max_scores out",
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_is_tensor(name, x)
    if query.dim() == key.dim() == value.dim() == 4:
        _check_heads(query, key, enable_gqa)
        key, value = _share_batch(query, key, value, block_mask)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    result = attention(
        query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale, return_lse=wants_lse
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    if return_aux is not None:
        return out, AuxOutput(lse=lse)
    return out if lse is None else (out, lse)


def _check_options(options: Mapping[str, object] | None) -> None:
    for name, value in (options or {}).items():
        if name.removeprefix("fwd_").removeprefix("bwd_") not in _HINTS:
            raise UnknownOption(
                f"there is no kernel option {name!r}",
                hint=f"one of {', '.join(sorted(_HINTS))}; all are hints",
            )
        if name == "BACKEND" and value not in _BACKENDS:
            raise UnknownOption(f"there is no BACKEND {value!r}", hint=f"one of {', '.join(_BACKENDS)}")
    if options and "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise UnknownOption(
            "BACKEND and FORCE_USE_FLEX_ATTENTION are both given", hint="leave FORCE_USE_FLEX_ATTENTION out"
        )


def _check_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ShapeMismatch(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}",
            hint="pass enable_gqa=True to share key heads between query heads",
        )


def _share_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of keys and values serves all queries under a block mask of their batch, as in PyTorch."""
    batch = query.shape[0]
    if key.shape[0] == batch:
        return key, value
    if block_mask is None or key.shape[0] != 1:
        raise ShapeMismatch(
            f"query has batch {batch} and key has {key.shape[0]}",
            hint="pass the same batch, or key and value of batch 1 with a block_mask of the query's batch",
        )
    if block_mask.shape[0] != batch:
        raise BlockMaskMismatch(
            f"query has batch {batch}, key has 1, and the block mask {block_mask.shape[0]}",
            hint=f"make the block mask with B={batch}",
        )
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
