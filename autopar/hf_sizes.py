"""Small sizes for a config of transformers: values by the name of the key, and what some kinds of model need besides.

In: the class of a config.  Out: `small`, keyword arguments for it.  Next: `hf_inputs.py`.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[int, str] = {
    1: """
        num_hash n_group topk_group first_k_dense_replace moe_layer_start_index num_dense_layers num_expert_group
        prompt_types expert_capacity
    """,
    2: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk
        moe_k moe_top_k window_size num_hidden_groups linear_num_key_heads num_query_groups mamba_n_groups
        n_groups num_blocks num_self_attends_per_block index_topk swa_num_key_value_heads speech_encoder_layers
        t2u_encoder_layers t2u_decoder_layers conf_num_hidden_layers
    """,
    4: """
        num_local_experts num_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim chunk_size
        mamba_chunk_size block_size attention_window local_radius global_block_size linear_num_value_heads
        num_landmarks num_latents state_size mamba_d_state ssm_state_size time_step_rank mamba_dt_rank
        index_n_heads
    """,
    6: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads
        swa_num_attention_heads speech_encoder_attention_heads t2u_encoder_attention_heads
        t2u_decoder_attention_heads num_self_attention_heads num_cross_attention_heads
    """,
    8: """
        head_dim qk_nope_head_dim v_head_dim d_kv dim_head kv_channels attention_head_size linear_key_head_dim
        linear_head_dim linear_value_head_dim patch_size num_mel_bins swa_head_dim d_head index_head_dim
        local_attention attention_window_size sliding_window_size mamba_head_dim mamba_d_head
        attention_chunk_size d_rel num_conv_pos_embeddings query_pre_attn_scalar
    """,
    12: """
        q_lora_rank kv_lora_rank hidden_size_per_layer_input laurel_rank adapter_rank mamba_num_heads
        mamba_n_heads qk_head_dim
    """,
    24: """
        embedding_size moe_intermediate_size expert_ffn_hidden_size word_embed_proj_dim max_source_positions
        projection_dim
    """,
    32: """
        max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions image_size
        max_encoder_position_embeddings max_decoder_position_embeddings original_max_position_embeddings
        max_2d_position_embeddings model_max_length t2u_max_position_embeddings rel_extent sliding_window
    """,
    48: """
        hidden_size d_model n_embd dim emb_dim embed_dim embedding_dim d_embed attention_hidden_size d_latents
        input_embedding_size output_embedding_size lru_width cross_attention_hidden_size unit_embed_dim
    """,
    53: """
        vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input entity_vocab_size
        unit_hifi_gan_vocab_size t2u_vocab_size char_vocab_size unpadded_vocab_size shape_vocab_size
        pronunciation_vocab_size
    """,
    60: """
        intermediate_size n_inner encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim dff dim_ff d_inner hidden_dim
        ffn_hidden_size feed_forward_size moe_shared_expert_intermediate_size shared_expert_intermediate_size
        shared_intermediate_size intermediate_size_mlp dense_intermediate_size mlp_dim
        speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim router_hidden_size
    """,
}
SMALL: dict[str, Any] = {key: value for value, keys in SIZES.items() for key in keys.split()}

LATENT = {"head_dim": 4, "num_key_value_heads": 6, "qk_head_dim": 12}  # attention on what keys and values share
FOUR = {"depths": [1, 1, 1, 1], "hidden_sizes": [12, 24, 36, 48], "embedding_size": 12, "patch_size": 4}
HEADS = {**FOUR, "hidden_sizes": [8, 16, 40, 64], "num_attention_heads": [1, 2, 5, 8]}
WINDOWS = {"depths": [2, 1], "num_heads": [3, 6], "embed_dim": 24, "patch_size": 4, "window_size": 4}

KINDS: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bit": {**FOUR, "hidden_sizes": [16, 16, 32, 32], "embedding_size": 16, "num_groups": 4},
    "convnext": FOUR,
    "convnextv2": FOUR,
    "cpmant": {"prompt_types": 32},
    "cvt": {"embed_dim": [12, 24, 48], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "donut-swin": WINDOWS,
    "dots3_note_text": {"num_key_value_heads": 6},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 6},
    "falcon_h1": {"mamba_d_ssm": 96},
    "focalnet": {**FOUR, "hidden_sizes": [12, 24, 48, 96], "embed_dim": 12},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hgnet_v2": {
        **FOUR,
        "stem_channels": [3, 8, 12],
        "stage_in_channels": [12, 16, 24, 32],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 24, 32, 48],
        "stage_num_blocks": [1, 1, 1, 1],
    },
    "hiera": {**FOUR, "image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 24, "num_heads": [1, 2, 4, 8]},
    "levit": {
        "depths": [1, 1, 1],
        "hidden_sizes": [24, 36, 48],
        "image_size": 64,
        "key_dim": [8, 8, 8],
        "num_attention_heads": [2, 3, 4],
        "patch_size": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 12},
    "minicpm3": LATENT,
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {
        "hidden_sizes": [12, 16, 24],
        "neck_hidden_sizes": [8, 8, 12, 16, 16, 24, 32],
        "num_attention_heads": 4,
        "patch_size": 2,
    },
    "mobilebert": {"num_attention_heads": 4},
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.25, "patch_size": 2},
    "neomme": {"head_dim": 16},
    "nystromformer": {"num_landmarks": 1, "segment_means_seq_len": 7},
    "poolformer": FOUR,
    "pvt": HEADS,
    "pvt_v2": HEADS,
    "regnet": {**FOUR, "groups_width": 12},
    "resnet": FOUR,
    "segformer": HEADS,
    "squeezebert": {"embedding_size": 48},
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [12, 24, 36, 48]},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "vibevoice_acoustic_tokenizer_encoder": {"depths": [1] * 7, "num_filters": 2},
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba2": {
        "attention_head_dim": 16,
        "attention_hidden_size": 96,
        "hybrid_layer_ids": [1],
        "layer_types": ["mamba", "hybrid"],
        "mamba_headdim": 8,
        "n_mamba_heads": 12,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def small(kind: Any, known: set[str]) -> dict[str, Any]:
    """Small values for those keys that a config class has; general ones under the names that are its own."""
    general = known - kind.attribute_map.keys()
    return {**{key: value for key, value in SMALL.items() if key in general}, **KINDS.get(kind.model_type, {})}
