"""Calls that sessions do not understand pass through, and what other weights read is not gone on with."""

from __future__ import annotations

import copy

import pytest
import torch
from by_budget import compress
from peft import LoraConfig, get_peft_model
from students import COMPRESSED
from tiny_families import own_student
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DynamicCache,
    GenerationConfig,
    LlavaConfig,
    MiniMaxConfig,
)

import dofla
from dofla.errors import DoflaError
from dofla.integration.weights_watch import WeightsWatch

ANSWER = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
IMAGE = 60
SIZES = {"vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}


@pytest.fixture
def pair(tiny):
    """A student with sessions and one without, in float64, where reading in two calls is the same to the token."""
    model = tiny.llama().double()
    plain = dofla.linearize(model, tiny.plan(model, **COMPRESSED))
    student = copy.deepcopy(plain)
    return student, plain, dofla.keep_sessions(student)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"generation_config": GenerationConfig(use_cache=False, **ANSWER)},
        {"position_ids": torch.arange(20)[None] + 50},
        {"guidance_scale": 1.5},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"token_type_ids": torch.zeros(1, 20, dtype=torch.int64)},
    ],
)
def test_what_is_not_understood_passes_through(pair, tiny, options):
    student, plain, sessions = pair
    ids = tiny.tokens(1, 20)
    student.generate(ids, **ANSWER)
    known = len(sessions)

    def asked(model):
        try:
            result = model.generate(ids, **ANSWER | options)
        except ValueError as error:
            return str(error)
        return result if isinstance(result, torch.Tensor) else [len(x[0][0]) for x in result.hidden_states]

    own, expected = asked(student), asked(plain)
    assert torch.equal(own, expected) if isinstance(own, torch.Tensor) else own == expected
    assert len(sessions) == known


def test_tokens_of_padding_without_a_mask_are_padding(pair, tiny):
    student, plain, sessions = pair
    ids = tiny.tokens(1, 20) % 63
    ids[0, :5] = 63
    assert torch.equal(*(x.generate(ids, pad_token_id=63, **ANSWER) for x in (student, plain)))
    assert len(sessions) == 0


def test_the_cache_that_is_returned_is_the_callers_own(pair, tiny):
    student, plain, sessions = pair
    for _ in range(2):  # the second time the prompt is known
        out = student.generate(tiny.tokens(1, 20), return_dict_in_generate=True, **ANSWER)
        aside = torch.cat([out.sequences, tiny.tokens(1, 5, seed=5)], 1)
        student.generate(aside, past_key_values=out.past_key_values, **ANSWER)
    ids = torch.cat([out.sequences, tiny.tokens(1, 5, seed=3)], 1)
    assert torch.equal(student.generate(ids, **ANSWER), plain.generate(ids, **ANSWER))
    assert sessions.read == 5


def test_past_the_positions_no_cache_is_returned(tiny):
    model = tiny.llama(max_position_embeddings=32)
    student = dofla.linearize(model, tiny.plan(model, **COMPRESSED))
    dofla.keep_sessions(student)
    short, long = (student.generate(tiny.tokens(1, n), return_dict_in_generate=True, **ANSWER) for n in (20, 40))
    assert isinstance(short.past_key_values, DynamicCache)
    assert long.past_key_values is None
    assert long.sequences.shape == (1, 46)


def test_within_softmax_and_outside_each_gives_its_own_text(pair, tiny):
    student, plain, sessions = pair
    ids = tiny.tokens(1, 20)
    for _ in range(2):
        with dofla.softmax(student), dofla.softmax(plain):
            assert torch.equal(*(x.generate(ids, **ANSWER) for x in (student, plain)))
        assert torch.equal(*(x.generate(ids, **ANSWER) for x in (student, plain)))
    assert len(sessions) == 2


def in_place(student):
    with torch.no_grad():
        student.lm_head.weight.neg_()


def through_data(student):
    student.model.layers[0].mlp.up_proj.weight.data.neg_()


def replaced(student):
    student.lm_head.weight = torch.nn.Parameter(-student.lm_head.weight.detach())


def step(student):
    student(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    torch.optim.SGD(student.parameters(), lr=1.0).step()


def loaded(student):
    student.load_state_dict({"lm_head.weight": -student.lm_head.weight}, strict=False)


@pytest.mark.parametrize("change", [in_place, through_data, replaced, step, loaded])
def test_what_other_weights_read_is_forgotten(pair, tiny, change):
    student, plain, sessions = pair
    ids = tiny.tokens(1, 20)
    said = student.generate(ids, **ANSWER)
    student.generate(ids, **ANSWER)
    assert sessions.read == 0
    change(student)
    change(plain)
    ids = torch.cat([said, tiny.tokens(1, 5, seed=3)], 1)
    assert torch.equal(student.generate(ids, **ANSWER), plain.generate(ids, **ANSWER))
    assert sessions.read == ids.shape[1] - 1


def test_adapters_that_are_switched_scaled_or_merged_are_noticed(pair, tiny):
    student, plain, sessions = pair
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(student, config)
    torch.manual_seed(0)
    other = get_peft_model(plain, config)
    ids, texts = tiny.tokens(1, 20), []

    def same():
        found = wrapped.generate(ids, **ANSWER)
        assert sessions.read == 19
        assert torch.equal(found, other.generate(ids, **ANSWER))
        texts.append(found)

    same()
    with wrapped.disable_adapter(), other.disable_adapter():
        same()
    same()
    for model in (wrapped, other):
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 3.0)
    same()
    for model in (wrapped, other):
        model.merge_adapter()
    same()
    assert not torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_looking_for_other_weights_is_two_operations(tiny):
    model = tiny.llama(num_hidden_layers=30)
    student, watch = dofla.linearize(model, tiny.plan(model, **COMPRESSED)), WeightsWatch()
    assert watch.changed(student)
    names = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if not operation.is_view:
                names.append(operation._schema.name)
            return operation(*args, **(kwargs or {}))

    with Operations():
        assert not watch.changed(student)
    assert names == ["aten::cat", "aten::equal"]


def seeing(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).double().eval()


def llava():
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    model = seeing(
        LlavaConfig(vision_config=vision, text_config=CONFIG_MAPPING["llama"](**SIZES), image_token_index=IMAGE)
    )
    return model, [{"pixel_values": torch.full((1, 3, 32, 32), light).double()} for light in (-1.0, 1.0)]


def qwen():
    """Its positions are those of the last picture that it saw, unless it is told."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"fullatt_block_indexes": [1], "window_size": 112, "patch_size": 14, "spatial_merge_size": 2}
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config=SIZES | {"rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
    )
    kinds = torch.zeros(1, 40, dtype=torch.int64)
    kinds[0, 2:18] = 1
    grid = {"image_grid_thw": torch.tensor([[1, 8, 8]]), "mm_token_type_ids": kinds}
    return seeing(config), [{"pixel_values": torch.full((64, 1176), light).double(), **grid} for light in (-1.0, 1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("family", [llava, qwen])
@pytest.mark.parametrize("together", [False, True])
def test_pictures_pass_through_and_texts_beside_them_go_on(tiny, family, together):
    model, pictures = family()
    student = dofla.linearize(model, tiny.plan(model, **COMPRESSED))
    plain = copy.deepcopy(student)
    if together:
        dofla.continuous_batching(student)
    sessions = dofla.keep_sessions(student)
    ids, text = tiny.tokens(1, 40) % IMAGE, tiny.tokens(1, 30, seed=2) % IMAGE
    ids[0, 2:18] = IMAGE
    answers = []
    for turn in range(3):
        answers += [(x.generate(ids, **picture, **ANSWER)) for picture in pictures for x in (student, plain)]
        assert torch.equal(answers[-4], answers[-3])
        assert torch.equal(answers[-2], answers[-1])
        said = student.generate(text, **ANSWER)
        assert torch.equal(said, plain.generate(text, **ANSWER))
        assert sessions.read == (4 if turn else 29)
        text = torch.cat([said, tiny.tokens(1, 4, seed=turn) % IMAGE], 1)
    assert not torch.equal(answers[0], answers[2])
    assert torch.equal(answers[0], answers[4])


def test_text_is_read_at_its_own_places_after_a_picture(tiny):
    model, pictures = qwen()
    student, text = dofla.linearize(model, tiny.plan(model, **COMPRESSED)), tiny.tokens(2, 30, seed=2) % IMAGE
    with torch.no_grad():
        wanted = student(text, use_cache=False).logits[:, -1]
    ids = tiny.tokens(1, 40) % IMAGE
    ids[0, 2:18] = IMAGE
    student.generate(ids, **pictures[0], **ANSWER)
    stream = dofla.Stream(student)
    logits = [stream.read(piece) for piece in text.split(7, dim=1)][-1][:, -1]
    cache = dofla.read_prompt(student, text, chunk=7)
    torch.testing.assert_close(logits, wanted)
    for one, other in zip(cache.layers, stream.cache.layers, strict=True):
        assert all(torch.equal(x.tokens, y.tokens) for x, y in zip(one.states, other.states, strict=True))


def test_an_encoder_decoder_has_no_sessions(caplog):
    student, ids = own_student("bart", "softmax_first"), torch.arange(3, 23)[None]
    wanted = student.generate(ids, **ANSWER)
    sessions = dofla.keep_sessions(student)
    assert "keeps no states of texts" in caplog.text
    assert torch.equal(student.generate(ids, **ANSWER), wanted)
    assert len(sessions) == 0
    for read in (lambda: dofla.read_prompt(student, ids), lambda: dofla.Stream(student)):
        with pytest.raises(DoflaError, match="is an encoder-decoder, into which no text is read beforehand"):
            read()


def test_a_model_with_a_cache_of_its_own_kind_has_no_sessions(tiny):
    config = MiniMaxConfig(
        **SIZES, head_dim=8, block_size=16, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    student, ids = compress(model, tiny.tokens(6, 64), budget=24, head_budgets="even"), tiny.tokens(1, 20)
    wanted = student.generate(ids, **ANSWER)
    sessions = dofla.keep_sessions(student)
    assert torch.equal(student.generate(ids, **ANSWER), wanted)
    assert len(sessions) == 0
    for read in (lambda: dofla.read_prompt(student, ids), lambda: dofla.Stream(student)):
        with pytest.raises(DoflaError, match="works with a cache of its own kind"):
            read()
