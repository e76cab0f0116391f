"""Mods of attention-gym, transformers and PyTorch, unchanged."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attn_gym import masks as gym_masks
from attn_gym import mods as gym_mods
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks
from transformers import masking_utils as hf

from tests.mods import Setting, register


@register("mask", "attn_gym")
def gym_causal(s: Setting) -> Any:
    return gym_masks.causal_mask


@register("mask", "attn_gym")
def gym_batchify(s: Setting) -> Any:
    return gym_masks.batchify_mask_mod(gym_masks.causal_mask, 37)


@register("mask", "attn_gym", q_len=106, kv_len=106, scales=False)
def gym_block_diffusion(s: Setting) -> Any:
    return gym_masks.generate_block_diffusion_mask(53, 7)


@register("mask", "attn_gym")
def gym_dilated(s: Setting) -> Any:
    return gym_masks.generate_dilated_sliding_window(30, 3)


@register("mask", "attn_gym")
def gym_document(s: Setting) -> Any:
    return gym_masks.generate_doc_mask_mod(gym_masks.causal_mask, s.offsets())


@register("mask", "attn_gym")
def gym_packed_causal_document(s: Setting) -> Any:
    return gym_masks.generate_packed_causal_doc_mask_mod(s.offsets())


@register("mask", "attn_gym", q_len=101, kv_len=90, scales=False)
def gym_flamingo(s: Setting) -> Any:
    intervals = torch.tensor([[0, 40], [20, 70], [60, 101]], device=s.device)
    return gym_masks.generate_vision_cross_attention_mask_mod(intervals, 30)


@register("mask", "attn_gym")
def gym_global_sliding_window(s: Setting) -> Any:
    return gym_masks.generate_global_sliding_window(9, s.flags(0.05, s.kv_len))


@register("mask", "attn_gym", q_len=11, kv_len=61, scales=False)
def gym_tree(s: Setting) -> Any:
    ancestors = gym_masks.build_tree_ancestor_matrix([-1, 0, 0, 1, 1, 2, 3, 5, 7, 7, 4], device=s.device)
    return gym_masks.generate_jetspec_tree_causal_mask_mod(50, ancestors)


@register("mask", "attn_gym", q_len=55, kv_len=75, scales=False)
def gym_tree_training(s: Setting) -> Any:
    return gym_masks.generate_jetspec_training_mask_mod(20, 5)


@register("mask", "attn_gym", q_len=110, kv_len=110, scales=False)
def gym_natten(s: Setting) -> Any:
    return gym_masks.generate_natten(10, 11, 5, 3)


@register("mask", "attn_gym", q_len=144, kv_len=144, scales=False)
def gym_tiled_natten(s: Setting) -> Any:
    return gym_masks.generate_tiled_natten(12, 12, 5, 5, 4, 4)


@register("mask", "attn_gym", q_len=64, kv_len=64, scales=False)
def gym_morton_natten(s: Setting) -> Any:
    return gym_masks.generate_morton_natten(8, 8, 3, 3)


@register("mask", "attn_gym")
def gym_prefix_lm(s: Setting) -> Any:
    return gym_masks.generate_prefix_lm_mask(21)


@register("mask", "attn_gym")
def gym_sliding_window(s: Setting) -> Any:
    return gym_masks.generate_sliding_window(19)


@register("mask", "attn_gym", q_len=69, kv_len=69, scales=False)
def gym_sliding_tile_2d(s: Setting) -> Any:
    return gym_masks.generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2), 5)


@register("mask", "attn_gym", q_len=69, kv_len=69, scales=False)
def gym_sliding_tile_3d(s: Setting) -> Any:
    return gym_masks.generate_sta_mask_mod_3d((4, 4, 4), (2, 2, 2), (2, 2, 2), 5)


@register("mask", "attn_gym")
def gym_spatial_head(s: Setting) -> Any:
    return gym_masks.generate_spatial_head_mask_mod(11, 6, 16, 2, attn_sink=True, round_width=8)


@register("mask", "attn_gym")
def gym_temporal_head(s: Setting) -> Any:
    return gym_masks.generate_temporal_head_mask_mod(11, 6, 16, 2)


@register("mask", "attn_gym", q_len=90, kv_len=90, scales=False)
def gym_video_sparse(s: Setting) -> Any:
    chosen = s.integers(0, 6, s.batch, s.heads, 6, 3)
    sizes = torch.tensor([15, 15, 9, 15, 15, 4], device=s.device)
    return gym_masks.generate_vsa_mask_mod(chosen, 15, sizes)


@register("mask", "attn_gym", q_len=90, kv_len=90, scales=False)
def gym_video_padding(s: Setting) -> Any:
    from attn_gym.masks.vsa import generate_vsa_padding_mask_mod

    return generate_vsa_padding_mask_mod(torch.tensor([15, 15, 9, 15, 15, 4], device=s.device), 15)


@register("score", "attn_gym")
def gym_alibi(s: Setting) -> Any:
    return gym_mods.generate_alibi_bias(s.heads)


@register("score", "attn_gym")
def gym_activation_gelu(s: Setting) -> Any:
    return gym_mods.generate_activation_score_mod(F.gelu, 1.0)


@register("score", "attn_gym")
def gym_activation_relu(s: Setting) -> Any:
    return gym_mods.generate_activation_score_mod(F.relu, 1.5)


@register("score", "attn_gym")
def gym_softcap(s: Setting) -> Any:
    return gym_mods.generate_tanh_softcap(20)


@register("score", "attn_gym")
def gym_sandwich(s: Setting) -> Any:
    return gym_mods.generate_sandwich_bias(s.heads, max(s.q_len, s.kv_len), device=s.device)


@register("score", "attn_gym", q_len=43, kv_len=43)
def gym_latent_rope(s: Setting) -> Any:
    queries, keys = s.randn(s.batch, s.heads, s.q_len, 8), s.randn(s.batch, 1, s.kv_len, 8)
    return gym_mods.generate_mla_rope_score_mod(queries, keys, s.heads, 0.5)


def _graph(s: Setting) -> torch.Tensor:
    links = s.flags(0.08, s.batch, s.q_len, s.kv_len)
    return links | links.transpose(1, 2)


@register("score", "attn_gym", q_len=37, kv_len=37)
def gym_graphormer_spatial(s: Setting) -> Any:
    distances = gym_mods.shortest_path_distances(_graph(s), 4)
    return gym_mods.generate_graphormer_spatial_bias(s.randn(s.heads, 6), distances)


@register("score", "attn_gym", q_len=37, kv_len=37)
def gym_graphormer_edges(s: Setting) -> Any:
    kinds = s.integers(0, 5, s.batch, s.q_len, s.kv_len)
    paths, lengths = gym_mods.shortest_path_edge_types(_graph(s), kinds, 3)
    return gym_mods.generate_graphormer_edge_bias(s.randn(s.heads, 3, 5), paths, lengths)


@register("mask", "transformers")
def hf_causal(s: Setting) -> Any:
    return hf.causal_mask_function


@register("mask", "transformers")
def hf_bidirectional(s: Setting) -> Any:
    return hf.bidirectional_mask_function


@register("mask", "transformers")
def hf_sliding_window_causal(s: Setting) -> Any:
    return hf.sliding_window_causal_mask_function(17)


@register("mask", "transformers")
def hf_sliding_window_bidirectional(s: Setting) -> Any:
    return hf.sliding_window_bidirectional_mask_function(17)


@register("mask", "transformers")
def hf_chunked_causal(s: Setting) -> Any:
    return hf.chunked_causal_mask_function(23, torch.tensor([0, 5], device=s.device))


@register("mask", "transformers")
def hf_padding_causal(s: Setting) -> Any:
    padding = s.flags(0.8, s.batch, s.kv_len)
    return hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(padding))


@register("mask", "transformers")
def hf_packed_sequence(s: Setting) -> Any:
    documents = torch.stack([s.documents(), s.documents().flip(0)])
    return hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(documents))


@register("mask", "transformers")
def hf_blockwise(s: Setting) -> Any:
    groups = s.integers(-1, 3, s.batch, s.kv_len)
    return hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(groups))


if hasattr(hf, "remap_positions_for_packed_sequence"):  # newer than the transformers of some machines

    @register("mask", "transformers")
    def hf_remapped_positions(s: Setting) -> Any:
        positions = (torch.arange(s.kv_len, device=s.device) % 41).repeat(s.batch, 1)
        return hf.remap_positions_for_packed_sequence(hf.causal_mask_function, positions)


@register("mask", "transformers", q_len=29, kv_len=107)
def hf_offsets(s: Setting) -> Any:
    window = hf.sliding_window_causal_mask_function(31)
    return hf.add_offsets_to_mask_function(window, s.kv_len - s.q_len, 0)


@register("mask", "torch")
def torch_noop(s: Setting) -> Any:
    return noop_mask


@register("mask", "torch")
def torch_and_or(s: Setting) -> Any:
    documents = s.documents()

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    def first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < 4

    return or_masks(and_masks(gym_masks.causal_mask, same_document), and_masks(first, gym_masks.causal_mask))
