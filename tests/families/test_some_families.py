"""Some families of :data:`family_models.FAMILIES` in a few ways: mixtures of experts, recurrent layers between those of
attention, layers without positions, layers that share keys, heads of which a part is turned; and models that see."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from family_checks import AllInFloat64, in_float64
from family_models import build, config_of
from sizes import compress, size_of
from tiny_families import padded, tokens
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    LlavaConfig,
    MllamaForCausalLM,
    PreTrainedModel,
    SiglipVisionConfig,
)

import dofla
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.sites import attention_sites
from dofla.plans.layers import FeatureLayer, SoftmaxLayer

SHARING = ["gemma3n_text", "gemma4_text"]
QUICK = ["cohere2", "gemma4_text", "lfm2_moe", "mixtral", "qwen3_5_text", "stablelm"]
MORE = ["ernie4_5", "exaone4", "glm4", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "nemotron", "olmo3"]
MORE += ["olmoe", "gemma3n_text", "llama4_text", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "seed_oss"]
MORE += ["smollm3", "starcoder2"]
AS_IT_IS_CUT = {"head_budgets": "even", "prefill": "sequential"}
"""Options with which it does not matter how a text is cut into calls."""
RECURRENT = ["qwen3_5_text", "qwen3_next"]
"""Of which the states are computed in float32 else."""
CLOSE = 1e-5
"""Largest difference of two ways to the same number, relative to the largest logit: some families route in float32."""


@pytest.fixture(params=[*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE)])
def model(request):
    with AllInFloat64() if request.param in RECURRENT else nullcontext():
        yield in_float64(build(request.param, torch.float64))


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
    assert torch.allclose(dofla.linear.linearize(model, plan)(ids).logits, before, atol=CLOSE * before.abs().max())


@torch.no_grad()
def test_a_family_writes_with_a_memory_that_fades_and_is_given_back(model, tiny):
    ids = tiny.tokens(1, 60)
    before = model(ids).logits
    student = compress(model, tiny.tokens(6, 64, seed=1), tokens=48, **AS_IT_IS_CUT)
    after, cache = student(ids).logits, DynamicCache(config=student.config)
    pieces = [student(part, past_key_values=cache).logits for part in ids.split([40, 1, 1, 18], dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), after, atol=CLOSE * after.abs().max())
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
    vision, text = CLIPVisionConfig(**VISION), config_of("llama")
    model = seeing(LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE))
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
    vision, text = SiglipVisionConfig(**VISION), config_of("gemma3_text")
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
    config = config_of("mllama").text_config
    config.cross_attention_layers = [1]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MllamaForCausalLM(config).eval()
    ids = tiny.tokens(2, 60)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    student = compress(model, tiny.tokens(6, 64, seed=1), tokens=48, **AS_IT_IS_CUT)
    assert len(Converted.of(student).layers) == 1
    assert torch.equal(student.generate(ids, **options), student.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("family", SHARING)
@pytest.mark.parametrize("head_budgets", ["even", pytest.param("measured", marks=pytest.mark.slow)])
@torch.no_grad()
def test_layers_that_share_keys_stay_softmax_and_the_cache_is_right(family, head_budgets, tiny):
    model = in_float64(build(family, torch.float64))
    options = AS_IT_IS_CUT | {"head_budgets": head_budgets}
    student = compress(model, tiny.tokens(6, 128, seed=1), tokens=96, **options)
    assert [layer.name for layer in Converted.of(student).plan.converted] == ["model.layers.0.self_attn"]
    ids, cache = tiny.tokens(2, 120), DynamicCache(config=student.config)
    pieces = [student(part, past_key_values=cache).logits for part in ids.split([70, *[1] * 20, 30], dim=1)]
    whole = student(ids, use_cache=False).logits
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9 * whole.abs().max())
    last = student(ids, logits_to_keep=1).logits
    assert torch.allclose(last, whole[:, -1:], rtol=0, atol=1e-9 * whole.abs().max())


@pytest.mark.parametrize("prefill", ["exact", "twice"])
@pytest.mark.parametrize("family", [*SHARING, "minicpm3", "jetmoe", "bamba"])
@torch.no_grad()
def test_important_tokens_of_a_batch_are_those_of_each_prompt_alone(family, prefill, monkeypatch):
    """Where layers share keys, keys are made of latent ones, heads are more, or positions are not those of a cache."""
    monkeypatch.setattr("dofla.integration.second_reading.PIECE", 40)
    monkeypatch.setattr("dofla.integration.second_reading.BEFORE", 8)
    model, (alone, ids, mask) = in_float64(build(family, torch.float64)), padded((100, 63), "left")
    size = size_of(model, 48, None)
    dofla.compress(model, tokens(4, 96), size, head_budgets="even", prefill=prefill, keep_softmax=None)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, own in zip(together, alone, strict=True):
        assert torch.equal(row, model.generate(own, **options)[0, own.shape[1] :])


def test_a_layer_whose_keys_another_reads_cannot_be_linear(tiny):
    model = build("gemma4_text")
    sites = [site for site in attention_sites(model).values() if not site.linear_time]
    assert [site.shares_keys for site in sites] == [False, True, True, True]
    shapes = [(site.name, site.kv_heads, site.head_dim, site.value_dim) for site in sites]
    with pytest.raises(DoflaError, match=r"layers\.2\.self_attn cannot be converted: it shares its keys.*keep_softmax"):
        dofla.linear.linearize(model, dofla.linear.Plan([FeatureLayer(*shape, 8) for shape in shapes]))
    skipped = dofla.linear.profile(model, tiny.tokens(4, 16)).skipped
    assert "shares keys and values with other layers" in {layer.reason for layer in skipped}


@torch.no_grad()
@pytest.mark.parametrize("head_budgets", ["even", "measured"])
def test_heads_that_do_nothing_fade_like_others(head_budgets, tiny):
    """One projection of a layer is zero, in the next layer that of its first KV head, and so on."""
    model, ids = tiny.llama(num_hidden_layers=8, initializer_range=0.1), tiny.tokens(2, 60)
    for n, projection in enumerate(("o_proj", "q_proj", "k_proj", "v_proj")):
        first, second = (getattr(layer.self_attn, projection).weight for layer in model.model.layers[2 * n : 2 * n + 2])
        first.zero_()
        (second[:, :16] if projection == "o_proj" else second[: len(second) // 2]).zero_()
    before = model(ids).logits
    student = compress(model, tiny.tokens(6, 128, seed=1), tokens=96, head_budgets=head_budgets)
    assert (student(ids).logits - before).norm() < 0.1 * before.norm()
