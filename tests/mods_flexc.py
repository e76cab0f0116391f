"""The ready-made masks and score functions, and plain ones that people write."""

from __future__ import annotations

from typing import Any

import torch

from flexc import masks, scores
from flexc.mods import mask_mod
from tests.mods import Setting, register


@register("mask")
def causal(s: Setting) -> Any:
    return masks.causal


@register("mask", q_len=53, kv_len=107)
def causal_aligned_to_the_end(s: Setting) -> Any:
    offset = s.kv_len - s.q_len
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


@register("mask")
def sliding_window(s: Setting) -> Any:
    return masks.sliding_window(19)


@register("mask")
def window_and_first_keys(s: Setting) -> Any:
    def first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 4

    return masks.causal & (masks.sliding_window(19) | first)


@register("mask")
def prefix_lm(s: Setting) -> Any:
    return masks.prefix_lm(29)


@register("mask")
def prefix_lm_by_batch(s: Setting) -> Any:
    return masks.prefix_lm(torch.tensor([29, 3], device=s.device))


@register("mask")
def document_causal(s: Setting) -> Any:
    return masks.causal & masks.document(s.documents())


@register("mask")
def document_by_batch(s: Setting) -> Any:
    return masks.document(torch.stack([s.documents(), s.documents() // 2]))


@register("mask")
def document_from_cu_seqlens(s: Setting) -> Any:
    return masks.causal & masks.document_from_cu_seqlens(s.offsets())


@register("mask")
def chunked(s: Setting) -> Any:
    return masks.chunked(23)


@register("mask")
def dilated(s: Setting) -> Any:
    return masks.dilated(9, 3)


@register("mask")
def global_tokens(s: Setting) -> Any:
    return masks.global_tokens(s.flags(0.05, s.kv_len), 9)


@register("mask", q_len=108, kv_len=108, scales=False)
def natten2d(s: Setting) -> Any:
    return masks.natten2d(9, 12, (3, 5))


@register("mask", q_len=120, kv_len=120, scales=False)
def natten3d(s: Setting) -> Any:
    return masks.natten3d(4, 5, 6, 3)


@register("mask", q_len=108, kv_len=108, scales=False)
def sliding_tile_2d(s: Setting) -> Any:
    return masks.sliding_tile_2d(9, 12, (3, 3), (3, 3))


@register("mask", q_len=108, kv_len=108, scales=False)
def sliding_tile_3d(s: Setting) -> Any:
    return masks.sliding_tile_3d(3, 6, 6, (1, 2, 2), (3, 3, 1))


@register("mask", q_len=106, kv_len=106, scales=False)
def block_diffusion(s: Setting) -> Any:
    return masks.block_diffusion(53, 7)


@register("mask", q_len=13, kv_len=63, scales=False)
def tree(s: Setting) -> Any:
    context = torch.ones(13, 50, dtype=torch.bool, device=s.device)
    drafts = s.flags(0.3, 13, 13) | torch.eye(13, dtype=torch.bool, device=s.device)
    return masks.tree(torch.cat([context, drafts.tril()], 1))


@register("mask")
def not_causal(s: Setting) -> Any:
    return ~masks.causal


@register("mask")
def padding_by_length(s: Setting) -> Any:
    lengths = torch.tensor([s.kv_len - 10, s.kv_len // 2], device=s.device)
    return lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) & (q_idx < lengths[b])


@register("mask")
def two_windows_by_head(s: Setting) -> Any:
    windows = torch.tensor([5, 17, 40, 90], device=s.device)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < windows[h])


@register("mask")
def document_by_search(s: Setting) -> Any:
    starts = s.offsets()

    @mask_mod
    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.searchsorted(starts, q_idx, right=True) == torch.searchsorted(starts, kv_idx, right=True)

    return masks.causal & same


@register("mask")
def strided_and_local(s: Setting) -> Any:
    stride = 11
    return lambda b, h, q_idx, kv_idx: (
        (q_idx >= kv_idx) & ((q_idx // stride == kv_idx // stride) | (kv_idx % stride == stride - 1))
    )


@register("score")
def alibi(s: Setting) -> Any:
    return scores.alibi(2.0 ** -torch.arange(1, s.heads + 1, dtype=torch.float32, device=s.device))


@register("both")
def alibi_causal(s: Setting) -> Any:
    slopes = 2.0 ** -torch.arange(1, s.heads + 1, dtype=torch.float32, device=s.device)
    return masks.causal, scores.alibi(slopes)


@register("score")
def softcap(s: Setting) -> Any:
    return scores.softcap(15.0)


@register("both")
def softcap_window(s: Setting) -> Any:
    return masks.sliding_window(33), scores.softcap(15.0)


@register("score")
def relative_bias(s: Setting) -> Any:
    return scores.relative_bias(s.randn(s.heads, 65))


@register("score")
def temperature(s: Setting) -> Any:
    return scores.temperature(0.7)


@register("score")
def temperature_by_head(s: Setting) -> Any:
    return scores.temperature(s.randn(s.heads).abs() + 0.5)


@register("score")
def relative_position(s: Setting) -> Any:
    return lambda score, b, h, q_idx, kv_idx: score + 0.01 * (q_idx - kv_idx)


@register("score")
def relative_bias_t5(s: Setting) -> Any:
    """Buckets that grow with the logarithm of the distance (Raffel et al., 2020)."""
    table = s.randn(32, s.heads)

    def bucketed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - kv_idx).clamp(min=0)
        large = 16 + (torch.log((distance.float() / 16).clamp(min=1)) / 2.0794 * 15.9).long()
        return score + table[torch.where(distance < 16, distance, large.clamp(max=31)), h]

    return bucketed
