"""More families than those of families.py: mixtures of experts, recurrent layers between those of attention, layers
without positions, heads of which a part is turned."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sizes import compress
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    LlavaConfig,
    MllamaForCausalLM,
    PreTrainedModel,
)

import dofla
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.sites import attention_sites
from dofla.plans.layers import FeatureLayer, SoftmaxLayer

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "initializer_range": 0.1, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4}
MIXED |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARING = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 16}
SHARING |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
SHARING |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}

FAMILIES = {
    "cohere2": SLIDING,
    "ernie4_5": {},
    "exaone4": SLIDING,
    "gemma3n_text": SHARING | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": SHARING | {"global_head_dim": 8, "num_global_key_value_heads": 2},
    "glm4": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 48},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "olmo3": SLIDING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": 256},  # as many as there are positions
    "phimoe": {"sliding_window": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    "qwen3_5_text": MIXED,
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **MIXED},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


@pytest.fixture(params=FAMILIES)
def model(request):
    config = CONFIG_MAPPING[request.param](**SIZES | FAMILIES[request.param])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def test_where_nothing_has_left_the_window_a_family_is_as_it_was(model, tiny):
    ids = tiny.tokens(2, 60)
    before = model(ids).logits
    sites = [site for site in attention_sites(model).values() if not site.linear_time]
    window = partial(FeatureLayer, window=64, feature_map="none")
    kinds = [SoftmaxLayer if site.shares_keys else window for site in sites]
    shapes = [(site.name, site.kv_heads, site.head_dim, site.value_dim) for site in sites]
    plan = dofla.linear.Plan([kind(*shape) for kind, shape in zip(kinds, shapes, strict=True)])
    assert window in kinds
    assert torch.allclose(dofla.linear.linearize(model, plan)(ids).logits, before, atol=1e-4 * before.abs().max())


@torch.no_grad()
def test_a_family_writes_with_a_memory_that_fades_and_is_given_back(model, tiny):
    ids = tiny.tokens(1, 60)
    before = model(ids).logits
    student = compress(model, tiny.tokens(6, 64, seed=1), tokens=48, head_budgets="even")
    after, cache = student(ids).logits, DynamicCache(config=student.config)
    pieces = [student(part, past_key_values=cache).logits for part in ids.split([40, 1, 1, 18], dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), after, atol=1e-4 * after.abs().max())
    assert not torch.allclose(after, before, atol=1e-4 * before.abs().max())
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    written = student.generate(ids, attention_mask=torch.ones_like(ids), **options)
    padded = torch.nn.functional.pad(ids, (5, 0))
    again = student.generate(padded, attention_mask=(torch.arange(65) >= 5).long()[None], **options)
    assert torch.equal(again[:, 5:], written)
    assert torch.equal(dofla.restore(student)(ids).logits, before)


IMAGE = 60
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}


def seeing(config) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval()


@torch.no_grad()
def test_a_model_that_sees_remembers_what_it_saw(tiny):
    text = CONFIG_MAPPING["llama"](**SIZES)
    model = seeing(LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_index=IMAGE))
    ids = tiny.tokens(1, 60) % IMAGE
    ids[0, 2:18] = IMAGE
    pictures = [torch.full((1, 3, 32, 32), light) for light in (-1.0, 1.0)]
    dark, bright = (model(input_ids=ids, pixel_values=picture).logits for picture in pictures)
    student = compress(model, tiny.tokens(6, 64, seed=1) % IMAGE, tokens=48, head_budgets="even")
    answers = [student(input_ids=ids, pixel_values=picture).logits for picture in pictures]
    assert (answers[1] - bright).norm() < (answers[1] - dark).norm()
    assert (answers[0] - dark).norm() < (answers[0] - bright).norm()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert student.generate(input_ids=ids, pixel_values=pictures[0], **options).shape == (1, 64)


@torch.no_grad()
def test_pictures_whose_parts_see_each_other_are_refused_and_text_is_not(tiny):
    text = CONFIG_MAPPING["gemma3_text"](**SIZES | SLIDING)
    vision = CONFIG_MAPPING["siglip_vision_model"](**VISION)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE)
    student = compress(seeing(config), tiny.tokens(6, 64) % IMAGE, tokens=48, head_budgets="even")
    ids = tiny.tokens(1, 60) % IMAGE
    assert student(input_ids=ids).logits.isfinite().all()
    ids[0, 2:6] = IMAGE
    picture = {"pixel_values": torch.ones(1, 3, 32, 32), "token_type_ids": (ids == IMAGE).long()}
    with pytest.raises(DoflaError, match="got a 4-dimensional attention mask"):
        student(input_ids=ids, **picture)


@torch.no_grad()
def test_a_model_whose_layers_look_at_pictures_writes_without_one(tiny):
    config = CONFIG_MAPPING["mllama_text_model"](**SIZES | {"cross_attention_layers": [3], "head_dim": None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MllamaForCausalLM(config).eval()
    ids = tiny.tokens(2, 60)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    student = compress(model, tiny.tokens(6, 64, seed=1), tokens=48, head_budgets="even")
    assert len(Converted.of(student).layers) == 3
    assert torch.equal(student.generate(ids, **options), student.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("head_budgets", ["even", pytest.param("measured", marks=pytest.mark.slow)])
@torch.no_grad()
def test_layers_that_share_keys_stay_softmax_and_the_cache_is_right(family, head_budgets, tiny):
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval().double()
    student = compress(model, tiny.tokens(6, 128, seed=1), tokens=96, head_budgets=head_budgets)
    kept = {layer.name: isinstance(layer, SoftmaxLayer) for layer in Converted.of(student).plan.layers}
    assert kept == {f"model.layers.{n}.self_attn": n != 1 for n in (1, 3, 5)}
    ids, cache = tiny.tokens(2, 120), DynamicCache(config=student.config)
    pieces = [student(part, past_key_values=cache).logits for part in ids.split([70, *[1] * 20, 30], dim=1)]
    whole = student(ids, use_cache=False).logits
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9 * whole.abs().max())
    last = student(ids, logits_to_keep=1).logits
    assert torch.allclose(last, whole[:, -1:], rtol=0, atol=1e-9 * whole.abs().max())


def test_a_layer_whose_keys_another_reads_cannot_be_linear(tiny):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma4_text"](**SIZES | FAMILIES["gemma4_text"])).eval()
    sites = [site for site in attention_sites(model).values() if not site.linear_time]
    assert [site.shares_keys for site in sites] == [False, True, True]
    shapes = [(site.name, site.kv_heads, site.head_dim, site.value_dim) for site in sites]
    with pytest.raises(DoflaError, match=r"layers\.3\.self_attn cannot be converted: it shares its keys.*keep_softmax"):
        dofla.linear.linearize(model, dofla.linear.Plan([FeatureLayer(*shape, 8) for shape in shapes]))
    skipped = dofla.linear.profile(model, tiny.tokens(4, 16)).skipped
    assert "shares keys and values with other layers" in {layer.reason for layer in skipped}


@pytest.mark.parametrize("projection", ["o_proj", "q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("head_budgets", ["even", "measured"])
def test_heads_that_do_nothing_fade_like_others(projection, head_budgets, tiny):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES)).eval()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, projection).weight.zero_()
        weight = getattr(model.model.layers[2].self_attn, projection).weight
        (weight[:, :16] if projection == "o_proj" else weight[: len(weight) // 2]).zero_()  # the first KV head's
        ids = tiny.tokens(2, 60)
        before = model(ids).logits
        student = compress(model, tiny.tokens(6, 128, seed=1), tokens=96, head_budgets=head_budgets)
        assert (student(ids).logits - before).norm() < 0.1 * before.norm()
