"""Tiny models of many families, with random weights: built in milliseconds, and each the real class of its family."""

import copy
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from sizes import compress
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

import dofla
from dofla.feature_maps import FEATURE_MAPS
from dofla.integration.sites import attention_sites
from dofla.plans.layers import FeatureLayer, SoftmaxLayer

VOCABULARY = 96
POSITIONS = 512

# Weights of this size make attention far from uniform, so that a wrong key or a lost token shows.
_ANY = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
_BASE = {**_ANY, **_SIZE, "intermediate_size": 48, "max_position_embeddings": POSITIONS}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "initializer_range": 0.2, **_ANY}
_GPT |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
_OPT = {**_ANY, **_SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": POSITIONS, "dropout": 0.0}
_SLIDING = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], **_GROUPED}
_DECODER = {"model_type": "bert", "is_decoder": True, **_BASE}

CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gpt_neox": _BASE,
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {"head_dim": 12, **_GROUPED},
    "mistral": {"sliding_window": None, **_GROUPED},
    "phi": _BASE,
    "opt": _OPT,
    "gemma": {"head_dim": 12, **_GROUPED},
    "olmo2": _GROUPED,
    "bert_decoder": {**_DECODER, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "gemma3": {"model_type": "gemma3_text", **_SLIDING},
}
"""Of decoders that can be linearized, without dropout; in gemma3 every other layer has a window and stays as it is."""

_BART = {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "init_std": 0.2}
_BART |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}
_PICTURES = {"intermediate_size": 48, "image_size": 32, "patch_size": 8}

_OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "bert": (AutoModel, _BASE),
    "roberta": (AutoModelForMaskedLM, _BASE),
    "vit": (AutoModelForImageClassification, {**_SIZE, **_PICTURES}),
    "splinter": (AutoModel, _BASE),
    "diffllama": (AutoModelForCausalLM, _GROUPED),
    "falcon_h1": (AutoModelForCausalLM, {**_MAMBA, **_GROUPED}),
    "gemma2": (AutoModelForCausalLM, _SLIDING),
    "gpt_oss": (AutoModelForCausalLM, {**_EXPERTS, **_SLIDING}),
    "mistral_sliding": (AutoModelForCausalLM, {"model_type": "mistral", "sliding_window": 16, **_GROUPED}),
    "gpt2_crossing": (AutoModelForCausalLM, {"model_type": "gpt2", "add_cross_attention": True, **_GPT}),
    "bert_crossing": (AutoModelForCausalLM, {**_DECODER, "add_cross_attention": True}),
    "bart": (AutoModelForSeq2SeqLM, _BART),
    "t5": (AutoModelForSeq2SeqLM, {**_T5, "decoder_start_token_id": 0}),
}


@cache
def _model(family: str) -> PreTrainedModel:
    auto, fields = (AutoModelForCausalLM, CAUSAL[family]) if family in CAUSAL else _OTHERS[family]
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(**{"model_type": family, **fields})).eval()


def teacher(family: str) -> PreTrainedModel:
    """A model of the family, the same weights each time; the caller's own."""
    return copy.deepcopy(_model(family))


def plan_for(model: PreTrainedModel, kind: str = "plain") -> dofla.linear.Plan:
    """A plan for all layers of ``model`` that can be linearized.

    Kinds: ``plain``, one number of features; ``ragged``, features, window and sinks not the same for all KV heads;
    ``eight_bits``, the same with exact tokens in eight bits; ``exact_window``, ``exact_sinks``, a window or sinks for
    all of any text; ``softmax_first``, ``softmax_last`` and ``all_softmax``, plain but for the first, the last or all
    layers; and any of them with another feature map, as in ``ragged/performer``. What cannot be linear is kept softmax
    in all.
    """
    kind, _, feature_map = kind.partition("/")
    sites = list(attention_sites(model).values())
    last = len(sites) - 1
    kept = {"softmax_first": {0}, "softmax_last": {last}, "all_softmax": set(range(len(sites)))}.get(kind, set())
    layers = []
    for n, site in enumerate(sites):
        shape = (site.name, site.kv_heads, site.head_dim, site.value_dim)
        if n in kept or site.linear_time or site.refusal:
            layers.append(SoftmaxLayer(*shape))
            continue
        ragged = [(5, 7, 7, 5)[head] + n for head in range(site.kv_heads)]
        each = {"window": [(3, 6, 6, 0)[head] for head in range(site.kv_heads)]}
        each |= {"sinks": [(2, 1, 1, 2)[head] for head in range(site.kv_heads)]}
        options = {
            "ragged": {"features": ragged, **each},
            "eight_bits": {"features": ragged, **each, "token_dtype": "int8"},
            "exact_window": {"features": ragged, "window": POSITIONS},
            "exact_sinks": {"features": ragged, "sinks": POSITIONS},
        }
        own = options.get(kind, {"features": 8})
        layers.append(FeatureLayer(*shape, **own, feature_map=feature_map or "prf"))
    return dofla.linear.Plan(layers, model=type(model).__name__)


@cache
def _student(family: str, kind: str) -> PreTrainedModel:
    return own_student(family, kind)


def student(family: str, kind: str = "plain") -> PreTrainedModel:
    """The linearized model, shared by all tests that do not change it; the others take :func:`own_student`."""
    return _student(family, kind)


def own_student(family: str, kind: str = "plain") -> PreTrainedModel:
    """A linearized model the caller may change, or with the kind ``compressed`` one with a compressed cache.

    Those that keep eight bits or codes are in float64: where two ways to the same number differ in its last digit, they
    may differ by a whole step after rounding. The compressed cache reads prompts token by token, so that it does not
    matter how a text is cut.
    """
    model = teacher(family)
    if kind == "compressed":
        options = {"head_budgets": "even", "prefill": "sequential"}
        return compress(model.double(), tokens(4, 48), tokens=48, **options)
    model = model.double() if kind == "eight_bits" else model
    return dofla.linear.linearize(model, plan_for(model, kind))


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random tokens [batch, length], none of them the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two pictures, or two texts of which the first is padded on its right."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 13:] = 0
    extra = {"decoder_input_ids": tokens(2, 9)} if model.config.is_encoder_decoder else {}
    return {"input_ids": tokens(2, 20), "attention_mask": mask, **extra}


def padded(lengths: tuple[int, ...], side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Random sequences of these lengths, and the batch of them with its mask, padded on this side to the longest."""
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
    alone = [tokens(1, length, seed=length) for length in lengths]
    for row, sequence in enumerate(alone):
        length = sequence.shape[1]
        place = slice(max(lengths) - length, None) if side == "left" else slice(length)
        ids[row, place], mask[row, place] = sequence[0], 1
    return alone, ids, mask


MAPS = sorted(set(FEATURE_MAPS) - {"prf", "none"})
"""All feature maps but the positive random features that nearly all tests run with."""

CASES = [
    *[(family, f"plain/{name}") for family, name in zip(CAUSAL, cycle(["prf", *MAPS]), strict=False)],
    *[(family, "compressed") for family in ("gpt2", "llama")],
    *[pytest.param(family, "compressed", marks=pytest.mark.slow) for family in ("gpt_neox", "opt")],
    *[(family, "ragged") for family in ("gpt2", "gpt_neox", "llama", "opt")],
    *[(family, "eight_bits") for family in ("gpt2", "llama", "opt", "bert_decoder")],
    *[(family, kind) for family in ("gpt2", "llama", "bert_decoder") for kind in ("softmax_first", "softmax_last")],
    ("llama", "all_softmax"),
]
"""Family and kind of plan of the students that must behave as any causal language model does."""
