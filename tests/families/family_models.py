"""Tiny random models of every family of causal language models in transformers: sizes for all, and what single
families need besides."""

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY, POSITIONS, WINDOW = 96, 256, 16
LAYERS, KINDS = 2, 4
"""Layers, and where they may be of several kinds."""
MOST = 12_000_000
"""Parameters of a tiny model at most."""

# Weights of this size make attention far from uniform, so that a wrong key or a lost token shows.
_SIZES: dict[str, Any] = {"initializer_range": 0.15, "init_std": 0.15, "vocab_size": VOCABULARY}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES |= dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "out_hidden_size"), 64)
_SIZES |= dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "ffn_hidden_size"), 96)
_SIZES |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96)
_SIZES |= dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS
)
_SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "linear_num_value_heads"), 4)
_SIZES |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads"), 4)
_SIZES |= dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "depth"), 2)
_SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), POSITIONS)
_SIZES |= dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16)
_SIZES |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16)
_SIZES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4)
_SIZES |= dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2)
_SIZES |= dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1)
_SIZES |= dict.fromkeys(("qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state"), 8)
_SIZES |= {"sliding_window": WINDOW, "mamba_d_head": 32, "mamba_expand": 2, "image_size": 32, "patch_size": 8}

FAMILIES: dict[str, str] = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Model type and class of all causal language models of transformers, and of those that see, which read text alone."""

_FULL, _SLIDING, _RECURRENT = "full_attention", "sliding_attention", "linear_attention"
_DECODER = {"is_decoder": True}
_MIXED = {"layer_types": [_SLIDING, _FULL] * 2}
_UNBOUNDED, _NO_BOUND = {"sliding_window": None}, {"sliding_window": POSITIONS}
# Latent attention: heads of one kind, whose rotary part is of its own.
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
# The last two layers read the keys of the two before, and the first two are left.
_SHARED = {"num_hidden_layers": 6, "layer_types": [_FULL, _SLIDING] * 3, "num_kv_shared_layers": 2}
_SHARED |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_WITH_MAMBA = {"layer_types": ["mamba", "attention"] * 2}
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 16}
_INKLING |= {"sliding_window_size": WINDOW, "d_rel": 8}
_LOOP = {"num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
_UNPADDED = {"unpadded_vocab_size": VOCABULARY}
_SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_qk_rope_head_dim": 8, "swa_head_dim": 24}
_SWA |= dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim", "swa_q_lora_rank", "swa_kv_lora_rank"), 16)
_SWA |= dict.fromkeys(("index_head_dim", "shared_experts_intermediate_size"), 16)
_COMPASS = {"layer_types": [_FULL] * KINDS}
_COMPASS |= {"rope_parameters": {_FULL: {"rope_type": "default", "rope_theta": 10000.0}}}
_TEXT_LATENT, _TEXT_UNBOUNDED = {"text_config": _LATENT}, {"text_config": _UNBOUNDED}
_QWEN4 = {"layer_types": [_RECURRENT, _FULL] * 2, "hc_lowrank": 8, "ngram_vocab_size_base": 100, "indexer_n_heads": 2}
_QWEN4 |= {"split_ngram_parts": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64}
_QWEN4 |= {"indexer_compress_ratio": 4, "make_ngram_vocab_size_divisible_by": 8, "ple_embed_dim": 64}


def _turned(*sections: int) -> dict[str, Any]:
    """Positions of time, height and width, each of which turns so many pairs of numbers of a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


_TEXT_TURNED, _ROTARY = {"text_config": _turned(2, 3, 3)}, {"rotary_dim": 8}

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), _DECODER),
    **dict.fromkeys(("ernie", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), _DECODER),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
    **dict.fromkeys(("gemma3_text", "kolibri1", "ministral"), _MIXED),
    **dict.fromkeys(("ministral3", "mistral", "mixtral", "phi4_multimodal", "starcoder2"), _UNBOUNDED),
    **dict.fromkeys(("kimi_k25", "mistral_large4"), _TEXT_LATENT),
    **dict.fromkeys(("idefics2", "mistral3", "qwen3_vl_moe"), _TEXT_UNBOUNDED),
    **dict.fromkeys(("phi3", "phimoe"), _NO_BOUND),
    **dict.fromkeys(("cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga"), _TEXT_TURNED),
    **dict.fromkeys(("paddleocr_vl", "qwen2_5_vl", "qwen2_vl"), _TEXT_TURNED),
    **dict.fromkeys(("codegen", "gptj"), _ROTARY),
    "bailing_hybrid": {**_LATENT, "layer_types": [_RECURRENT, _FULL] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "segment_types": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "dory": {**_MIXED, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1, **_MIXED},
    "dots3_note_text": {**_LATENT, **_SWA, "index_n_heads": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3": {"text_config": _MIXED},
    "gemma3n_text": {**_SHARED, "laurel_rank": 8},
    "gemma4": {"text_config": {**_SHARED, "global_head_dim": 16, "num_global_key_value_heads": 2}},
    "gemma4_text": {**_SHARED, "global_head_dim": 16, "num_global_key_value_heads": 2},
    "gemma4_unified_text": {**_MIXED, "global_head_dim": 16, "num_global_key_value_heads": 2},
    "glm4v_moe": {"text_config": _turned(1, 1, 2)},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": _WITH_MAMBA,
    "inkling2_loop_text": {**_INKLING, **_UNPADDED, **_LOOP, "n_layers_per_attn_res_block": 1},
    "inkling2_text": {**_INKLING, **_UNPADDED},
    "inkling_text": _INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "layer_types": [_RECURRENT, _FULL] * 2},
    "kosmos-2.5": {"text_config": {"attention_heads": 4, "layers": LAYERS, "embed_dim": 64}},
    "lfm2_moe": {"layer_types": ["conv", _FULL] * 2},
    "longcat_flash": {**_LATENT, "num_layers": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax": {**_UNBOUNDED, "layer_types": [_RECURRENT, _FULL] * 2},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "n_groups": 1},
    "qwen2_5_omni_thinker": {**_TEXT_TURNED, "vision_start_token_id": 151_652},  # as checkpoints have
    "qwen3_omni_moe_thinker": {**_TEXT_UNBOUNDED, "vision_start_token_id": 151_652},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {**_DECODER, "shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2},
    "zaya": {**_UNBOUNDED, "num_experts_per_tok": 1},
}


def config_of(family: str) -> PreTrainedConfig:
    """The config of a family's tiny model."""
    return _small(CONFIG_MAPPING[family], OVERRIDES.get(family, {}))


def _small(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    stock = kind()
    known = {*stock.to_dict(), *inspect.signature(kind.__init__).parameters}
    known -= {name for name, other in stock.attribute_map.items() if other in _SIZES}
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    if hasattr(stock, "layer_types"):
        sizes |= {name: KINDS for name in ("num_hidden_layers", "num_layers") if name in sizes}
    for name in kind.sub_configs:
        sub = getattr(stock, name, None)
        if isinstance(sub, PreTrainedConfig):
            sizes[name] = _small(type(sub), own.get(name, {}))
    return kind(**sizes | {name: value for name, value in own.items() if name not in kind.sub_configs})


def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model of the family with random weights, the same each time."""
    kind, config = getattr(transformers, FAMILIES[family]), config_of(family)
    if not isinstance(config, kind.config_class):  # of a model for text alone, which is a part
        parts = (getattr(config, name) for name in type(config).sub_configs)
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(config).parameters())
    if count > MOST:
        raise ValueError(f"{family}: {count:,} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype).eval()
