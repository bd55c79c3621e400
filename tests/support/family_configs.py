"""A tiny configuration for every causal LM that transformers knows, also for those it will know: small sizes by the
names of a config's fields, and a table of what some families need besides.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 61
LAYERS = 3
MOST_LAYERS = 12
ORDINARY_TOKENS = range(3, 45)
"""Tokens that mean no padding, beginning, end, image or sound in any of the configs."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "embedding_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "dim_ff", "d_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 40),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "router_hidden_size",
        ),
        16,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "dim_head", "kv_channels", "v_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("attention_head_dim", "global_head_dim", "attention_head_size", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("swa_v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "index_n_heads": 32,  # of a few heads none may score above 0, and which tokens are the first of equals is open
    **dict.fromkeys(("linear_num_value_heads", "num_mamba_heads"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    "qk_nope_head_dim": 6,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 12),
    **dict.fromkeys(("laurel_rank", "adapter_rank", "gated_norm_rank", "hc_lowrank"), 8),
    **dict.fromkeys(("index_topk", "index_block_size", "window_size", "local_attention"), 4),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"), 5),
    "keep_window_size": 5,
    **dict.fromkeys(("floor_scale", "log_scaling_n_floor", "rel_extent", "original_max_position_embeddings"), 4),
    **dict.fromkeys(("block_size", "local_attn_chunk_length", "lsh_attn_chunk_length"), 4),
    "max_window_layers": 1,
    "use_sliding_window": True,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("max_source_positions", "context_length"), 128),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "zero_expert_num": 2,
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("decoder_sparse_step", "expert_layer_period"), 2),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    "mamba_d_ssm": 64,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size", "encoder_hash_byte_group_vocab"), VOCABULARY),
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "is_decoder": True,
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("output_router_logits", "use_cache"), False),
}
"""Names of fields that mean the same in all configs. Whatever is named dropout is 0 as well."""
DEPTHS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"}
DEPTHS |= {"encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"}

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
_INDEXER = {
    f"indexer_{name}": size
    for name, size in zip(("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio"), (2, 1, 8, 4, 2), strict=True)
}
_DOTS = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 12),
    "swa_head_dim": 10,
    "swa_qk_nope_head_dim": 6,
    "swa_v_head_dim": 8,
}
_GEMMA4 = {"global_head_dim": 8, "hidden_size_per_layer_input": 0}
_ASSISTANT = {**_GEMMA4, "vocab_size_per_layer_input": 0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {name: {"hidden_size_global": 32} for name in ("encoder_config", "decoder_config")},
    "blenderbot": {"encoder_layers": 2},
    "cohere_compass_text": {**_MIXED, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["dense"] * 3,
            "num_hidden_layers": 3,
        },
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
    },
    "dots3_note_text": _DOTS,
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4, "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32}},
    "gemma4_unified_assistant": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "num_layers": 3},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "laguna": _MIXED,
    "mamba2": {"num_heads": 8},
    "mellum": _MIXED,
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "num_hidden_layers": 3,
    },
    "ministral": _MIXED,
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.01},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16), "attn_layers": ("local", "lsh", "local")},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the sizes above do not do."""


REMARKS = {
    "gemma4": "without per-layer inputs (`hidden_size_per_layer_input: 0`)",
    "gemma4_text": "without per-layer inputs (`hidden_size_per_layer_input: 0`)",
}
"""What should be known about a config here that says less than the family's own."""


def families() -> tuple[str, ...]:
    """Every model type that ``AutoModelForCausalLM`` knows in the transformers that is installed."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


THRESHOLDS = re.compile(r"window|chunk|floor|original_max|extent|compressed|block_size")
"""Names of numbers beyond which tokens are computed with otherwise."""


def uncrossed(config: Any, longest: int) -> dict[str, Any]:
    """The thresholds of a config that no document of ``longest`` tokens crosses, vision and sound left out."""
    found = {}
    for name, value in config.items() if isinstance(config, dict) else config.get_text_config().to_dict().items():
        if isinstance(value, dict) and not str(name).startswith(("audio", "vision")):
            found |= uncrossed(value, longest)
        elif isinstance(value, int) and THRESHOLDS.search(str(name)) and not str(name).startswith("max_"):
            found |= {name: value} if value >= longest else {}
    return found


def tiny_config(family: str) -> PreTrainedConfig:
    """A config of tiny sizes without dropout, with the fewest layers from three on that show every kind of layer."""
    config = _config(family)
    for owner in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        ropes = getattr(owner, "rope_parameters", None) or {}
        for rope in (ropes, *ropes.values()):
            if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
                rope["original_max_position_embeddings"] = SIZES["original_max_position_embeddings"]
    return config


def _config(family: str) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[family]
    wanted = _kinds_of_layers(kind(**_small(kind, None, OVERRIDES.get(family, {}))))
    for depth in range(LAYERS, MOST_LAYERS + 1):
        config = kind(**_small(kind, depth, OVERRIDES.get(family, {})))
        if wanted <= _kinds_of_layers(config):
            return config
    return kind(**_small(kind, LAYERS, OVERRIDES.get(family, {})))


def _small(kind: type[PreTrainedConfig], depth: int | None, overrides: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a config class and the configs in it; the family's own depth if None."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    found = {name: SIZES[name] for name in names & SIZES.keys()}
    found |= {name: 0.0 for name in names if any(word in name for word in ("drop", "jitter", "noise"))}
    special = sorted(n for n in names - SIZES.keys() if n.endswith(("_token_id", "_token_index")))
    found |= {name: VOCABULARY - 1 - index for index, name in enumerate(special)}
    if depth is not None:
        found |= dict.fromkeys(names & DEPTHS, depth)
    if "qk_rope_head_dim" in names:  # low-rank attention: there are no fewer heads for keys and values
        found |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    sub_configs: Any = kind.sub_configs
    for name, sub in sub_configs.items():
        default = getattr(kind, "sub_configs_defaults", {}).get(name)
        if not issubclass(sub, PreTrainedConfig):
            if default is None:
                continue
            sub = CONFIG_MAPPING[default.model_type]
        found[name] = {**_small(sub, depth, overrides.get(name, {})), "model_type": sub.model_type}
    return found | {name: value for name, value in overrides.items() if name not in sub_configs}


def _kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    text = config.get_text_config()
    names = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
    return {f"{name} {kind}" for name in names for kind in getattr(text, name, None) or ()}
