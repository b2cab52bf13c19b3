"""Tables of the tiny models: the value of each field of a configuration, and the exceptions.

    TINY["hidden_size"]        64, in any configuration, also in nested ones
    SPECIAL["gemma3n_text"]    other values for one model type, also as a part of composite models
    VARIANTS["falcon+alibi"]   a model type with a switch that changes the role of positions
    NOT_BUILT["molmo2"]        the reason why there is no tiny model

`tiny_models.py` applies them. Tiny models are small in ways that hide nothing:

    structure  like the published model: several sizes of heads, keys wider than values, groups of
               experts, layers that use the keys of others
    lengths    every window, chunk and block is shorter than a short document
    layers     one of every kind in the full model: sliding and full attention, recurrence, experts
"""

from typing import Any

VOCAB_SIZE = 128

# 4 heads of 16 in a width of 64, keys and values in 2; recurrent layers have 4 heads of 32.
_BY_VALUE: list[tuple[Any, str]] = [
    (64, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size"),
    (64, "output_embedding_size word_embed_proj_dim out_hidden_size output_proj_dims lru_width"),
    (64, "adapter_in_dim adapter_input_size adapter_out_dim audio_embed_dim mm_embed_dim"),
    (64, "hidden_size_global backbone_hidden_size input_size text_hidden_size"),
    (64, "projector_hidden_size alignment_intermediate_size"),
    (96, "intermediate_size ffn_dim n_inner d_inner dff dim_ff mlp_dim feed_forward_size"),
    (96, "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size intermediate_size_mlp"),
    (96, "dense_intermediate_size prefix_dense_intermediate_size"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (32, "shared_expert_intermediate_size shared_experts_intermediate_size router_hidden_size"),
    (32, "moe_shared_expert_intermediate_size hidden_size_per_layer_input"),
    (4, "num_attention_heads num_heads n_head n_heads attention_heads swa_num_attention_heads"),
    (4, "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads"),
    (4, "num_decoder_attention_heads linear_num_heads linear_num_value_heads"),
    (4, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    # The scores of an index are sums of ReLUs over its heads. Of 4 heads, many sums are 0, and the
    # length of the row decides which of equal keys are kept.
    (32, "index_n_heads indexer_n_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (16, "head_dim d_head dim_head kv_channels attention_head_size"),
    (16, "linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim"),
    (16, "indexer_head_dim q_lora_rank kv_lora_rank o_lora_rank query_pre_attn_scalar"),
    (32, "mamba_d_head mamba_head_dim"),
    (128, "mamba_d_ssm"),
    (8, "rotary_dim mamba_d_state state_size ssm_state_size"),
    (1, "n_groups mamba_n_groups mamba_ngroups num_codebooks"),
    # Layers, if all are of one kind.
    (2, "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers"),
    (2, "num_encoder_layers num_decoder_layers num_blocks"),
    # Experts, two of four for each token; the first layer has none if the architecture allows it.
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts interleave_moe_layer_step"),
    (1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    ([0], "mlp_only_layers"),
    # Lengths: enough positions for any row; everything else is shorter than a document.
    (512, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (512, "context_length"),
    (8, "sliding_window sliding_window_size attention_window_size window_size mem_len"),
    (8, "attention_chunk_size local_attention_window_len chunk_size mamba_chunk_size block_size"),
    (8, "keep_window_size index_topk index_block_size indexer_budget chroma_length"),
    (16, "rel_extent local_attention relative_max_distance position_bias_max_distance"),
    (16, "position_bias_num_buckets floor_scale log_scaling_n_floor"),
    (32, "original_max_position_embeddings"),
    (4, "prompt_length"),
    # Switches. Some models turn windows off by default. Losses of experts mix documents by design.
    (True, "use_sliding_window is_decoder"),
    (False, "use_cache output_router_logits"),
    (1, "max_window_layers"),
    (0, "num_kv_shared_layers"),
    (0.2, "initializer_range init_std initializer_factor"),
    (1.0, "logit_scale logits_mup_width_multiplier"),
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (2, "eos_token_id"),
]
TINY: dict[str, Any] = {name: value for value, names in _BY_VALUE for name in names.split()}

# Sizes of heads that may differ keep their proportions: 128 becomes 16.
HEAD_SIZES = ("head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
# 2, or 1 if the full model has 1: one key for all heads, one expert for each token.
ONE_OR_TWO = (
    *("num_key_value_heads", "num_kv_heads", "n_group", "n_shared_experts"),
    *("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
)

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TWO_HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
# The last two layers, one of each kind, use the keys and values of the first two (gemma-4-E2B).
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _FULL] * 2,
    "num_kv_shared_layers": 2,
}


def _mrope(*sections: int) -> dict[str, Any]:
    """Return a rope with its frequencies split between time, height and width, as published."""
    return {"rope_parameters": _ROPE | {"mrope_section": list(sections)}}


# By model type, also for parts of composite models. Most entries add kinds of layers that published
# models have and the default configuration lacks, or set sizes that depend on each other.
SPECIAL: dict[str, dict[str, Any]] = {
    # The codes of images and sounds end the vocabulary, one range behind the other.
    "apertus1p5": {"image_token_offset": 120, "audio_token_offset": 124},
    "apertus1p5_vision_tokenizer": {"codebook_size": 4, "base_channels": 32},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # a decoder refuses the default on long rows
    # The threshold is about the median entropy here, so that patches depend on the text.
    "blt": {"encoder_hash_byte_group_vocab": 64, "patching_threshold": 4.4},
    **dict.fromkeys(("blt_local_decoder", "blt_local_encoder"), _TWO_HEADS),
    "chameleon": {"vocabulary_map": {"<image>": VOCAB_SIZE - 1}},
    "chameleon_vqgan": {"base_channels": 32},
    "cohere2_moe": {"layer_types": [_SLIDING, _FULL], "mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {"layer_types": [_SLIDING, _FULL]}
    | {"rope_parameters": dict.fromkeys((_SLIDING, _FULL), _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_top_k": 2, "moe_loss_weight": 0.0},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {"compress_rates": _RATES},
    "dots3_note_text": dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 2)
    | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 32, "swa_v_head_dim": 16}
    | {"swa_head_dim": 32, "swa_qk_nope_head_dim": 24},
    # Two of four layers run twice.
    "dory": {"num_hidden_layers": 4, "layer_types": [_SLIDING, _SLIDING, _FULL, _FULL]}
    | {"n_input_layers": 1, "n_output_layers": 1, "ngpt_alpha_init": 0.5},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse"]},
    "electra": {"embedding_size": 32},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16], **_mrope(3, 3, 2)},
    "evolla": {
        "protein_encoder_config": dict.fromkeys(("hidden_size", "intermediate_size"), 64)
        | {"num_hidden_layers": 1, "num_attention_heads": 4},
        "aligner_num_add_layers": 1,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 64, "num_experts": None, "use_double_wide_mlp": True}
    | _SHARED_KEYS,
    "gemma4_unified_text": {"global_head_dim": 64},
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {"deepstack_layer_map": [(0, 0)], "spatial_target_layers": [1]}
    | {"downsample_rate": "4/8"},
    "granitemoehybrid": {"layer_types": [_LINEAR, _FULL]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    # The first layer has no blocks before it. Of the loop, the third and fourth run three times.
    "inkling2_text": {"num_hidden_layers": 3, "n_layers_per_attn_res_block": 2}
    | {"layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"]},
    "inkling2_loop_text": {"num_hidden_layers": 5, "n_layers_per_attn_res_block": 2}
    | {"layer_types": [*["hybrid_sliding"] * 3, "hybrid", "hybrid"], "loop_gate_rank": 8}
    | {"loop_layer_index_start": 2, "loop_layer_index_end": 4},
    "inkling_text": {"swa_num_key_value_heads": 4},
    "janus_vision_model": {"projection_dim": 64},
    "janus_vqgan": {"base_channels": 32, "num_embeddings": 64}
    | dict.fromkeys(("projection_dim", "image_token_embed_dim"), 64),
    "kosmos-2.5": {"latent_query_num": 4},
    "kosmos_2_5_text_model": {"embed_dim": 64, "layers": 2},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 64},
    "laguna": {"layer_types": [_FULL, _SLIDING], "mlp_layer_types": ["dense", "sparse"]}
    | {"num_attention_heads_per_layer": [4, 6]},
    **{name: {"layer_types": ["conv", _FULL]} for name in ("lfm2", "lfm2_moe")},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": [_FULL, _SLIDING]},
    "minicpm3": {"dim_model_base": 64, "v_head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": [_FULL, "minimax_m3_sparse"], "index_topk_blocks": 2}
    | {"index_n_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [64] * 4, "depths": [1] * 4},
    "muse_spark_text": {"moe_hidden_size": 64},
    "nemotron_h_omni": {"audio_config": None, "vision_hidden_size": 64},
    "prophetnet": {"num_buckets": 8},
    "qwen2_vl_vision": {"embed_dim": 64},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},
    "qwen4_exp_text": {"indexer_head_dim": 32, "indexer_kv_heads": 1}
    | {"indexer_compress_ratio": 4, "hc_lowrank": 8}
    | {"ple_layer_ids": [1], "ngram_vocab_size_base": 64, "split_ngram_parts": 1},
    "radio": {"video_temporal_patch_size": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},  # recurrent, recurrent, attention
    # Trains only on multiples of the chunk length. The seed keeps its random hashes the same.
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "num_buckets": 4}
    | {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 0},
    "step3p5": {"num_sliding_attention_heads": 6},
    "glm4v_moe_text": _mrope(1, 1, 2),
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    "hy_v4_vl_text": _mrope(2, 1, 1)
    | {"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]},
    "paddleocr_vl_text": _mrope(4, 6, 6),
    "wavtokenizer_encoder": {"codebook_size": 3, "hidden_size": 64, "codebook_dim": 64},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [_LINEAR, "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "num_experts_per_tok": 1},
}

# Model types by how their frequencies are split between time, height and width.
for _sections, _names in {
    (4, 2, 2): "cosmos3_edge_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text",
    (2, 3, 3): "glm4v_text glm_ocr_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text",
}.items():
    SPECIAL |= {name: _mrope(*_sections) for name in _names.split()}

#: Architectures with a switch that changes the role of positions: name -> (model type, changes).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon+alibi": ("falcon", {"alibi": True}),
    "gemma4_text+experts": (  # like gemma-4-26B-A4B: layers without a window use keys as values
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "use_double_wide_mlp": False}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
        | {"num_hidden_layers": 2, "layer_types": [_SLIDING, _FULL]}
        | {"hidden_size_per_layer_input": 0},
    ),
    "llama+dynamic": (  # frequencies change when a row (not a document) is longer than 32
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
        | {"max_position_embeddings": 32},
    ),
    "phi3+longrope": (  # likewise: short or long factors for the whole row
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS}}
        | {"sliding_window": None},
    ),
}

_DRAFT_HEAD = "it is the draft head of another model, and needs the keys of that model"
_ENCODER_DECODER = "it is an encoder-decoder, and its decoder does not run without the encoder"
_NO_TEXT_ALONE = "it does not run on text alone"
_NOT_BUILT_BY_REASON = {
    _DRAFT_HEAD: "gemma4_assistant gemma4_unified_assistant",
    _ENCODER_DECODER: "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder",
    _NO_TEXT_ALONE: "blip blip-2 idefics instructblip instructblipvideo kosmos-2 pi0",
    "it trains only with the token types of its processor": "molmo2",
    "it is not a causal language model: it denoises one block at a time": "diffusion_gemma",
}
NOT_BUILT = {name: why for why, these in _NOT_BUILT_BY_REASON.items() for name in these.split()}
