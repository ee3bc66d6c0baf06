"""Caches that grow give what those do that had room from the beginning, whatever is done with them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

import dofla
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.integration.converted import Converted
from dofla.serving import CompiledModel, ContinuousBatching, Session, load_state, read_prompt, save_state

NEW = 40


@pytest.fixture(params=["all heads", "one head"])
def model(tiny, request):
    """A model of which all heads hold every token, or one does; it does not matter to it how a text is cut."""
    model, options = tiny.llama(), {"evict": False, "prefill": "sequential"}
    calibration = dofla.calibrate(model, tiny.tokens(2, 48))
    if request.param == "one head":
        options |= {"evict": True, "size": 6000, "head_budgets": "even", "retrieval_heads": 1}
        object.__setattr__(calibration, "retrieval", [("model.layers.1.self_attn", 0)])
    return dofla.compress(model, calibration=calibration, **options)


@pytest.fixture
def slots(monkeypatch):
    """A function that sets the least slots of a cache that grows."""
    return lambda least: monkeypatch.setattr("dofla.attention.layout.LEAST_SLOTS", least)


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_text_is_written_as_with_room_from_the_beginning(model, tiny, slots, options):
    ids = tiny.tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    for padding in ({}, {"attention_mask": mask}):
        slots(16)
        grown = greedy(model, ids, **padding, **options)
        slots(4096)
        assert torch.equal(grown, greedy(model, ids, **padding, **options))


@pytest.mark.parametrize("cuts", [[60], [1] * 60, [7, 1, 30, 22]])
def test_states_are_those_of_the_final_room_however_a_text_is_cut(model, tiny, slots, cuts):
    ids, caches = tiny.tokens(2, 60), []
    for least, own in ((16, cuts), (64, [60])):
        slots(least)
        cache, start = DynamicCache(config=model.config), 0
        for length in own:
            model(ids[:, start : start + length], use_cache=True, **{CACHE_ARGUMENT: cache})
            start += length
        caches.append(cache)
    for layer, few, most in zip(Converted.of(model).layers.values(), *(x.layers for x in caches), strict=True):
        (grown,), (fixed,) = layer.resized(few.states, 60), most.states
        opened = (layer.compressed.layouts.of(state.rows.shape[1]).open(state) for state in (grown, fixed))
        for one, other in zip(*opened, strict=True):
            for part in ("window", "sinks", "tier"):
                some, others = vars(getattr(one, part)), vars(getattr(other, part))
                assert all(torch.equal(x, others[name]) for name, x in some.items())


def test_a_row_of_padding_alone_keeps_its_state_while_others_grow(model, tiny, slots):
    slots(16)
    ids, caches = tiny.tokens(2, 50), [DynamicCache(config=model.config) for _ in range(2)]
    for rows, cache in zip((slice(0, 2), slice(0, 1)), caches, strict=True):
        model(ids[rows, :30], use_cache=True, **{CACHE_ARGUMENT: cache})
    mask = torch.ones(2, 50, dtype=torch.int64)
    mask[1, 30:] = 0
    model(ids[:, 30:], attention_mask=mask, use_cache=True, **{CACHE_ARGUMENT: caches[0]})
    model(ids[:1, 30:], use_cache=True, **{CACHE_ARGUMENT: caches[1]})
    last = ids[:, -1:]
    both, alone = (
        model(last[: len(cache.layers[0].states[0].rows)], use_cache=True, **{CACHE_ARGUMENT: cache}).logits
        for cache in caches
    )
    torch.testing.assert_close(both[:1], alone)


def test_bytes_are_little_more_than_the_tokens_take(model, tiny):
    plan, prompt = Converted.of(model).plan, tiny.tokens(1, 1000)
    for tokens in (200, 1000):
        held = cache_bytes(read_prompt(model, prompt[:, :tokens]))
        assert plan.cache_bytes(tokens) <= held <= 1.3 * plan.cache_bytes(tokens) + 4096


def test_a_saved_prompt_goes_on(model, tiny, slots, tmp_path):
    slots(16)
    ids = tiny.tokens(1, 50)
    cache = read_prompt(model, ids)
    save_state(cache, ids, tmp_path / "prompt.safetensors", model)
    prompt, loaded = load_state(tmp_path / "prompt.safetensors", model)
    more = torch.cat([prompt, tiny.tokens(1, 5)], 1)
    assert torch.equal(greedy(model, more, **{CACHE_ARGUMENT: loaded}), greedy(model, more))


def test_calls_of_different_lengths_share_passes(model, tiny, slots):
    slots(16)
    prompts = [tiny.tokens(1, length) for length in (5, 90, 30)]
    alone = [greedy(model, ids) for ids in prompts]
    with ContinuousBatching(model) as batching, ThreadPoolExecutor() as threads:
        together = list(threads.map(lambda ids: greedy(batching, ids), prompts))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_a_session_reads_on(model, tiny, slots, tmp_path):
    slots(16)
    ids = tiny.tokens(1, 30)
    for turn in (10, 20):
        session = Session(model, folder=tmp_path)  # another one each time
        ids = torch.cat([ids, tiny.tokens(1, turn)], 1)
        wanted, ids = greedy(model, ids), greedy(session, ids)
        assert torch.equal(ids, wanted)
    assert session.read < ids.shape[1] - 50


@pytest.mark.slow
def test_a_compiled_step_has_room_for_what_is_asked(model, tiny):
    ids = tiny.tokens(1, 30)
    compiled = CompiledModel(model)
    wanted = greedy(model, ids)
    assert torch.equal(greedy(compiled, ids), wanted)
    assert torch.equal(greedy(Session(compiled), ids), wanted)
