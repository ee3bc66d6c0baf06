"""Expectations of each family of :data:`family_models.FAMILIES`: those that are named neither in :data:`REFUSED`
nor in :data:`NOT_TESTED` are supported."""

from family_models import FAMILIES

_OWN_CODE = "attention code of its own, not transformers' attention interface"
_OWN_MASKS = "chooses what to attend to, by masks of its own"
_SINKS = "attention sinks that are parameters"
_CAPPED = "soft-capped attention logits"
_BESIDE = "attention that shares its entry of the cache with a recurrent layer"
_TWICE = "a layer is called more than once in a pass, with one entry of the cache"
_ACROSS = "attention to the outputs of earlier layers"
_BOTH_WAYS = "attention that sees both ways"
_BOUNDED = "all attention is bounded already, or recurrent"
_BIAS = "a position bias that is added to its scores"
_CODEBOOKS = "several tokens at each place"
_MASK = "a bias in its mask, or a mask that is neither causal nor bidirectional"

MESSAGES: dict[str, str] = {
    _OWN_CODE: "has no attention that goes through transformers' attention interface",
    _OWN_MASKS: "does not run without attention masks of its own",
    _SINKS: "its attention sinks are parameters",
    _CAPPED: "its logits are soft-capped",
    _BESIDE: "(it shares its entry of the cache with a recurrent layer|it has no entry of its own in the cache)",
    _TWICE: "it is called more than once in a pass",
    _ACROSS: "it is cross-attention",
    _BOTH_WAYS: "is bidirectional",
    _BOUNDED: "no layer is left to convert",
    _BIAS: "a position bias is added to its scores",
    _CODEBOOKS: "reads several tokens at each place",
    _MASK: "its mask is neither causal nor bidirectional",
}
"""The error's words, by reason."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("big_bird", "bloom", "cpmant", "falcon", "falcon_mamba", "git", "got_ocr2", "xlstm"), _OWN_CODE),
    **dict.fromkeys(("gpt_neo", "gpt_neox_japanese", "mamba", "mamba2", "megatron-bert", "mpt", "xlnet"), _OWN_CODE),
    **dict.fromkeys(("mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "rwkv", "trocr"), _OWN_CODE),
    **dict.fromkeys(("xglm", "xlm"), _OWN_CODE),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), _OWN_MASKS),
    **dict.fromkeys(("mistral_large4", "qwen4_exp", "qwen4_exp_text"), _OWN_MASKS),
    **dict.fromkeys(("flint", "gpt_oss", "granite_swa", "granitemoe_swa"), _SINKS),
    **dict.fromkeys(("gemma2", "vaultgemma"), _CAPPED),
    **dict.fromkeys(("falcon_h1", "zamba", "zamba2", "zaya"), _BESIDE),
    **dict.fromkeys(("diffllama", "dory", "hrm_text"), _TWICE),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _CODEBOOKS),
    "inkling_mm_model": _BIAS,
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), _ACROSS),
    **dict.fromkeys(("bigbird_pegasus", "paligemma"), _BOTH_WAYS),
    **dict.fromkeys(("deepseek_v4", "inkling_text"), _BOUNDED),
    **dict.fromkeys(("recurrent_gemma", "unlimited_ocr"), _BOUNDED),
    **dict.fromkeys(("doge", "gemma4_unified"), _MASK),
}

_PICTURES = "takes no text alone"
_PACKAGE = "needs the package timm"
_SMALL = "no small model could be built"
_DRAFT = "a draft model, which reads the keys of another"

NOT_TESTED: dict[str, str] = {
    **dict.fromkeys(("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pi0"), _PICTURES),
    **dict.fromkeys(("pix2struct", "pp_formulanet", "shieldgemma2", "udop", "vision-encoder-decoder"), _PICTURES),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), _PACKAGE),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT),
    **dict.fromkeys(("blt", "chameleon", "deepseek_ocr2", "diffusion_gemma", "dots3_note", "ernie4_5_vl_moe"), _SMALL),
    **dict.fromkeys(("florence2", "glm5_next", "glmga", "granite4_vision", "hunyuan_vl", "inkling2", "janus"), _SMALL),
    **dict.fromkeys(("mistral4", "molmo2", "muse_glimmer", "muse_spark", "nemotron_h_omni", "pp_chart2table"), _SMALL),
    **dict.fromkeys(("apertus1p5", "hy_v4_vl", "inkling2_loop"), _SMALL),
    "t5gemma2": "the decoder of an encoder-decoder does not run alone",
    "moshi": "its forward pass has no sliding window, and its generation has one",
}

_SHARED = "layers that share keys and values stay softmax"
_WINDOW = "opened with `sliding_window=None`"
_LONG = "with a sliding window as long as all positions, or none"
_DECODER = "with `is_decoder=True`"

REMARKS: dict[str, str] = {
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"), _DECODER),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"), _DECODER),
    **dict.fromkeys(("gemma3n_text", "gemma4", "gemma4_text"), _SHARED),
    **dict.fromkeys(("idefics2", "ministral3", "mistral", "mistral3", "mixtral", "starcoder2"), _WINDOW),
    "phi4_multimodal": _WINDOW,
    **dict.fromkeys(("phi3", "phimoe"), _LONG),
}
"""Needs of supported families, and options they were tested with."""

SUPPORTED: list[str] = sorted(set(FAMILIES) - set(REFUSED) - set(NOT_TESTED))
