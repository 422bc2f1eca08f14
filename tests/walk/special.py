"""What a few configs need beyond small numbers, each with the reason."""

from __future__ import annotations

from typing import Any

_GEMMA4 = {"global_head_dim": 64}  # the default is one config entry per layer

_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64}
_INDEXER |= {"indexer_compress_ratio": 4, "head_dim": 32}

# Types that have no logits of their own to compare, so that nothing can be proven about them.
NOT_ALONE: dict[str, str] = dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "It is a draft model: it reads the keys and values of the model it drafts for and gives no logits without them.",
)

# Its sliding layers have sizes of their own.
_SLIDING_MLA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 48}
_SLIDING_MLA |= {"swa_kv_lora_rank": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16}

_CROSS = {"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_head_dim": 32}

# Axes of time, height and width: 16 pairs of a head of 32, where the default has 64 for a head of 128.
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_AXES = {"rope_parameters": _PLAIN | {"mrope_section": [4, 6, 6]}}
_PICTURES = {"depth": 2, "num_heads": 4, "hidden_size": 128, "out_hidden_size": 128, "intermediate_size": 192}
_GLM = {"text_config": _AXES, "vision_config": _PICTURES}
_LAYERS_OF_MUSE = {"layer_types": ["window_attention", "full_attention"], "num_hidden_layers": 2}

_SOUND = {"num_filters": 2}  # doubled with each of its layers
_HEARD = {"num_hidden_layers": 4, "out_hidden_size": 128, "hidden_sizes": [16, 32, 64, 128], "depths": [1] * 4}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # the default config has no attention at all
    "blt": {"encoder_hash_byte_group_vocab": 1000, "encoder_hash_byte_group_size": [3, 4]},
    # Its checkpoints rotate in sliding layers and have no positions in the others; the default config has neither.
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": {**_PLAIN}, "full_attention": None},
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cosmos3_edge": {"text_config": _AXES | {"head_dim": 32}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "dia": {"decoder_config": _CROSS | {"cross_hidden_size": 128}},  # its decoder says the encoder's sizes again
    "distilbert": {"dim": 128, "hidden_dim": 192},
    "dots3_note": {"text_config": _SLIDING_MLA},
    "dots3_note_text": _SLIDING_MLA,
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": _AXES["rope_parameters"] | {"mrope_section": [6, 6, 4]}},
        "vision_config": _PICTURES,
    },
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 4},
    # Four kinds of layers, and the last ones share the cache of the kinds before them.
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [192] * 4},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "glm4v": _GLM,
    "glm4v_moe": {
        "text_config": {"rope_parameters": _PLAIN | {"mrope_section": [2, 3, 3]}},
        "vision_config": _PICTURES,
    },
    "glm_ocr": _GLM,
    "flaubert": {"emb_dim": 128},
    "funnel": {"d_inner": 192},
    "fun_asr_nano": {
        "text_config": {"hidden_size": 128},
        "adaptor_config": {"hidden_size": 128, "intermediate_size": 32},
    },
    "glm5_next": {
        "text_config": {"qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 32},
        "vision_config": _PICTURES,
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "4/8"},
    "granite_docling": {"text_config": {"hidden_size": 128}, "vision_config": {"out_hidden_size": 128}},
    "granite_speech": {"encoder_config": {"hidden_dim": 128, "dim_head": 32}},
    "granite_speech_plus": {"encoder_config": {"hidden_dim": 128, "dim_head": 32}},
    "granitemoehybrid": {  # rotary is off by default; layer_types show both kinds
        "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    # Their own defaults for the one, windows as wide as a padded text for the other, are too long for a walk.
    "hunyuan_vl": {"text_config": _AXES | {"head_dim": 32}},
    "hy_v4_vl": {
        "text_config": {"qk_rope_head_dim": 16, "rope_parameters": _PLAIN | {"mrope_section": [4, 2, 2]}},
        "vision_config": {"out_hidden_size": 128},
    },
    "kosmos-2": {"text_config": {"embed_dim": 128, "layers": 2, "attention_heads": 4}, "latent_query_num": 4},
    "kosmos-2.5": {"text_config": {"embed_dim": 128, "layers": 2, "attention_heads": 4}, "latent_query_num": 4},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 128}},
    "layoutlmv3": {"hidden_size": 128, "coordinate_size": 24, "shape_size": 16},
    "lilt": {"hidden_size": 192, "num_attention_heads": 4},  # a sixth of it for each side of a box
    "led": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 16},
    "luke": {"entity_vocab_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_hidden_layers": 3},
    "mamba2": {"hidden_size": 128, "num_heads": 4, "head_dim": 64, "n_groups": 1},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [32, 96]},
    "muse_glimmer": {"vision_config": _LAYERS_OF_MUSE},
    "muse_spark": {
        "text_config": {"hidden_size": 128},
        "vision_config": _LAYERS_OF_MUSE,
        "audio_config": _HEARD,
    },
    "paddleocr_vl": {"text_config": _AXES},
    "qwen2_vl": {"text_config": _AXES, "vision_config": {"depth": 2, "embed_dim": 128, "hidden_size": 128}},
    "qwen2_5_vl": _GLM,
    "qwen2_5_omni_thinker": {"text_config": _AXES},
    "step3p7": {  # its default has layers of one kind
        "text_config": {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 16,
            "rope_parameters": {"full_attention": _PLAIN | {"rope_theta": 500000.0}, "sliding_attention": {**_PLAIN}},
        },
    },
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 2, "num_cross_attention_heads": 4},
    "qwen4_exp_text": _INDEXER,  # without them it has linear attention only
    "qwen4_exp": {"text_config": _INDEXER},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 64, "ext_pw_out_channel": 128, "num_blocks": 2}},
    "recurrent_gemma": {"num_hidden_layers": 3},  # only every third layer has attention
    "roc_bert": {"shape_vocab_size": 128, "pronunciation_vocab_size": 128},
    "switch_transformers": {"d_ff": 192},
    "vibevoice": {"audio_config": _SOUND, "semantic_model_config": _SOUND},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _SOUND, "semantic_tokenizer_encoder_config": _SOUND},
    "xlm": {"emb_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"use_mem_rope": True},  # rotary is off by default
}
