"""What the tests of kernels on a GPU share: inputs, and which GPU they are for."""

from __future__ import annotations

import pytest
import torch

NEEDS_SM90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm90 GPU"
)
HOPPER_MODS = (
    "causal", "window_and_first_keys", "prefix_lm_by_batch", "document_by_batch", "natten2d", "alibi_causal",
    "two_windows_by_head", "softcap_window", "relative_bias", "tree", "nothing_allowed", "whole_rows_masked",
    "full_bias", "gym_activation_gelu", "page_table", "random_bits_by_hashing",
)  # fmt: skip
"""Of the corpus, those whose Hopper kernels differ."""


def random_qkv(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tensors on the GPU; v has the head dimension of k where none is given."""
    shapes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, dim_v or dim))
    q, k, v = (torch.randn(batch, *shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v
