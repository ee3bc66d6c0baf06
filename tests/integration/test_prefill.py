"""How a prompt enters the cache: exactly, or token by token."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sizes import compress
from tiny_families import padded, teacher, tokens
from transformers import DynamicCache

import dofla
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.interface import token_by_token
from dofla.integration.recorder import recording, run_body
from dofla.integration.second_reading import _obstacle
from dofla.serving import ContinuousBatching, Session, load_state, read_prompt, save_state

LENGTH = 200


@pytest.fixture
def windows(tiny):
    return tiny.tokens(3, LENGTH)


def compressed(tiny, windows, prefill):
    model = tiny.llama(max_position_embeddings=512)
    return dofla.compress(model, windows, ratio=4, context=256, head_budgets="even", prefill=prefill)


@torch.no_grad()
def read(model, ids, cache=None, **options):
    cache = DynamicCache(config=model.config) if cache is None else cache
    return model(input_ids=ids, **{CACHE_ARGUMENT: cache}, use_cache=True, **options)


def test_an_exact_prefill_answers_as_the_original(tiny, windows):
    ids = windows[:1]
    right = tiny.llama(max_position_embeddings=512)(input_ids=ids, use_cache=False).logits
    model = compressed(tiny, windows, "exact")
    assert torch.allclose(read(model, ids).logits, right, atol=1e-4)
    with token_by_token():
        assert not torch.allclose(read(model, ids).logits, right, atol=1e-2)


def test_where_nothing_is_evicted_a_sequence_begins_exactly_and_a_few_tokens_go_on_one_by_one(tiny, windows):
    ids, original = windows[:2], tiny.llama(max_position_embeddings=512)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    model = dofla.compress(tiny.llama(max_position_embeddings=512), windows, evict=False)
    for given in ({}, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}):
        at = {name: x[:, :120] for name, x in given.items()}
        right = original(input_ids=ids[:, :120], use_cache=False, **at).logits
        answers = []
        for cuts in ([60], [1] * 60, [40, 1, 19]):
            cache, start, found = DynamicCache(config=model.config), 120, []
            first = read(model, ids[:, :120], cache, **at).logits
            real = mask[:, :120] > 0 if given else torch.ones(2, 120, dtype=torch.bool)
            assert torch.allclose(first[real], right[real], atol=1e-4)
            for count in cuts:
                end = start + count
                own = (
                    {"attention_mask": mask[:, :end], "position_ids": given["position_ids"][:, start:end]}
                    if given
                    else {}
                )
                found.append(read(model, ids[:, start:end], cache, **own).logits)
                start = end
            answers.append(torch.cat(found, 1))
        assert all(torch.allclose(x, answers[0], atol=1e-4) for x in answers)
        with token_by_token():
            assert not torch.allclose(read(model, ids[:, :120], **at).logits, right, atol=1e-2)


def test_without_a_cache_tokens_are_read_one_after_the_other(tiny, windows):
    ids = windows[:1]
    model = compressed(tiny, windows, "sequential")
    with torch.no_grad():
        single = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(read(model, ids).logits, single, atol=1e-4)
    for prefill in ("exact", "twice"):
        assert torch.equal(compressed(tiny, windows, prefill)(input_ids=ids, use_cache=False).logits, single)


@pytest.mark.parametrize("prefill", ["exact", "twice"])
def test_a_call_that_wants_no_cache_gives_what_decoding_gives(tiny, windows, prefill):
    """transformers makes a cache for it all the same: likelihoods and training would see nothing of the compression."""
    ids, model = windows[:2], compressed(tiny, windows, prefill)
    asked = {"input_ids": ids, "labels": ids}
    right = model(**asked, use_cache=False)
    gradient = torch.autograd.grad(right.loss, model.get_input_embeddings().weight)[0]
    with torch.no_grad():
        assert torch.equal(model(**asked).logits, right.logits)
        answer = model(**asked, use_cache=True)
        assert not torch.allclose(answer.logits, right.logits, atol=1e-2)
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model()
        # The body knows nothing of the calls before, failed ones among them.
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model.base_model()
        for asked_of_it, wanted in (({"use_cache": True}, answer), ({}, right)):
            assert torch.equal(model.lm_head(model.base_model(ids, **asked_of_it).last_hidden_state), wanted.logits)
    for cache in (None, True):
        found = model(**asked, use_cache=cache)
        assert torch.equal(found.loss, right.loss)
        found = torch.autograd.grad(found.loss, model.get_input_embeddings().weight)[0]
        assert torch.allclose(found, gradient, atol=1e-6)


@pytest.mark.parametrize("prefill", ["exact", "twice"])
def test_decoding_goes_on_after_an_exact_prefill(tiny, windows, prefill):
    """Left-padded rows are continued as those rows alone are."""
    model, ids = compressed(tiny, windows, prefill), windows[:2].clone()
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)[:, LENGTH:]
    alone = model.generate(ids[1:, 30:], attention_mask=mask[1:, 30:], **options)[:, LENGTH - 30 :]
    assert torch.equal(together[1:], alone)


def attention_again(model, ids, pieces):
    """The sum of the squared attention weights that queries of a second time give each token, by layer [Hkv, n]. A
    piece is where it begins, how many of its tokens do not count, and its end."""
    names, length, total = [f"model.layers.{n}.self_attn" for n in range(len(model.model.layers))], ids.shape[1], 0
    for first, skipped, end in pieces:
        calls = []
        with torch.no_grad(), recording(model, names, calls.append):
            run_body(model, {"input_ids": torch.cat([ids, ids[:, first:end]], 1)})
        weights = [call.log_weights().exp()[0, :, length + skipped :, :length].square() for call in calls]
        heads = calls[0].key.shape[1]
        total += torch.stack([x.unflatten(0, (heads, -1)).sum((1, 2)) for x in weights])
    return total


def test_a_prompt_is_important_by_its_second_reading(tiny, windows, importances, monkeypatch):
    """Of padded rows too, wherever the padding stands; what follows is read once, by predictions, and single tokens."""
    monkeypatch.setattr("dofla.integration.second_reading.PIECE", 90)
    monkeypatch.setattr("dofla.integration.second_reading.BEFORE", 8)
    model, ids = compressed(tiny, windows, "twice"), windows[:2]
    mask, cache = torch.ones_like(ids), DynamicCache(config=model.config)
    mask[0, :30], mask[1, -20:] = 0, 0
    places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    exact = read(compressed(tiny, windows, "exact"), ids, **places).logits
    importances.clear()
    torch.testing.assert_close(read(model, ids, cache, **places).logits[0, 30:], exact[0, 30:], rtol=0, atol=1e-4)
    layers = len(importances)
    assert layers == len(model.model.layers)
    for row, own, pieces in (
        (0, slice(30, None), [(0, 0, 90), (82, 8, 170)]),
        (1, slice(-20), [(0, 0, 90), (82, 8, 180)]),
    ):
        for found, wanted in zip(importances, attention_again(model, ids[row : row + 1, own], pieces), strict=True):
            before = found.shape[2] - wanted.shape[1]
            assert not found[row, :, :before].any()  # padding, which layers get in front
            torch.testing.assert_close(found[row, :, before:], wanted, rtol=1e-4, atol=1e-6)
    read(model, ids[:, :9], cache, attention_mask=torch.cat([mask, mask[:, 30:39]], 1))
    predicted, importances[:] = importances[layers:], []
    assert all(importance.shape == (2, 2, 9) for importance in predicted)
    read(model, ids[:, :1])
    assert all(importance is None for importance in importances)


@pytest.mark.parametrize("prefill", ["exact", "twice"])
def test_importance_serves_beams_assistants_saved_prompts_and_sessions(tiny, windows, importances, tmp_path, prefill):
    model, ids = compressed(tiny, windows, prefill), windows[:1]
    options = {"max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(ids, **options)
    assert model.generate(ids, num_beams=2, **options).shape == wanted.shape
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), wanted)
    assert model.generate(ids, prompt_lookup_num_tokens=3, **options).shape == wanted.shape  # read once
    cache = read_prompt(model, ids[:, :-1], chunk=50 if prefill == "twice" else LENGTH)
    save_state(cache, ids[:, :-1], tmp_path / "prompt.safetensors", model)
    again = model.generate(ids, **{CACHE_ARGUMENT: load_state(tmp_path / "prompt.safetensors", model)[1]}, **options)
    assert torch.equal(Session(model).generate(ids, **options), again)
    with ContinuousBatching(model) as batching:
        assert torch.equal(batching.generate(ids, **options), wanted)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3"])
def test_prompts_are_read_twice_with_learned_positions_and_beside_softmax_layers(family, monkeypatch):
    """Padded rows as those rows alone, in several pieces."""
    monkeypatch.setattr("dofla.integration.second_reading.PIECE", 40)
    monkeypatch.setattr("dofla.integration.second_reading.BEFORE", 8)
    alone, ids, mask = padded((100, 63), "left")
    model, windows = teacher(family).double(), tokens(4, 96)
    compress(model, windows, head_budgets="even", prefill="twice", keep_softmax=None)  # gemma3's local layer
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, own in zip(together, alone, strict=True):
        assert torch.equal(row, model.generate(own, **options)[0, own.shape[1] :])
    for given in ({}, {"return_dict": False}):  # with gradients too
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True, **given)[1]
        assert type(cache) is DynamicCache
        assert cache.get_seq_length() == 100


def test_a_second_reading_leaves_other_threads_alone(tiny, windows):
    model = compressed(tiny, windows, "twice")
    texts = [windows[n : n + 1, : 150 + n] for n in range(3)] * 4

    def follow(ids):
        """What follows a prompt, by what its cache holds."""
        cache = DynamicCache(config=model.config)
        read(model, ids, cache)
        return torch.cat([read(model, windows[:1, n : n + 1], cache).logits for n in range(20)])

    wanted = [follow(ids) for ids in texts]
    with ThreadPoolExecutor(4) as threads:
        for one, other in zip(threads.map(follow, texts), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_prompt_without_room_for_a_second_time_is_read_once(tiny, windows, importances, caplog):
    model = compressed(tiny, windows, "twice")
    model.config.max_position_embeddings = 2 * LENGTH - 1
    read(model, windows[:1])
    assert "a prompt of 200 tokens is read once" in caplog.text
    predicted, once = importances[-len(model.model.layers) :], compressed(tiny, windows, "exact")
    importances.clear()
    read(once, windows[:1])
    assert torch.equal(predicted[0], importances[0])  # later layers read what the ways of this one give


def test_the_second_reading_stands_behind_the_first(tiny, windows, importances):
    """At positions that are given, and in a batch without any, of rotary models at the places of the tokens."""
    model, ids = compressed(tiny, windows, "twice"), windows[:2]
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    layers = len(model.model.layers)
    importances.clear()
    read(model, ids[:1])
    read(model, ids[:1], position_ids=torch.arange(100, 100 + LENGTH)[None])
    read(model, ids, attention_mask=mask)
    read(model, ids[1:, 30:])
    found = [importances[n * layers : (n + 1) * layers] for n in range(4)]
    for one, other in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    for batch, row, alone in zip(found[2], found[0], found[3], strict=True):
        torch.testing.assert_close(batch[:1], row, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(batch[1:, :, 30:], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"position_ids": torch.arange(LENGTH).expand(3, 1, -1)}, "several dimensions"),
        ({"token_type_ids": torch.zeros(1, LENGTH)}, "its tokens have token_type_ids"),
        ({"attention_mask": torch.ones(1, 1, LENGTH, LENGTH)}, "more than padding"),
    ],
)
def test_a_prompt_with_more_than_tokens_is_read_once(tiny, windows, given, reason):
    model = compressed(tiny, windows, "twice")
    assert reason in _obstacle(model, DynamicCache(config=model.config), input_ids=windows[:1], **given)
    assert _obstacle(model, DynamicCache(config=model.config), input_ids=windows[:1]) is None


def test_no_prompt_is_read_twice_across_a_change_of_its_rotary_factors(tiny, windows):
    model = compressed(tiny, windows, "twice")
    for length, place in ((LENGTH - 1, False), (LENGTH, True), (2 * LENGTH - 1, True), (2 * LENGTH, False)):
        model.config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": length}
        found = _obstacle(model, DynamicCache(config=model.config), input_ids=windows[:1])
        assert (found is not None) == place


def test_gradient_checkpointing_and_another_attention_leave_prompts_alone(tiny, windows, importances):
    model = compressed(tiny, windows, "twice")
    model.gradient_checkpointing_enable()
    read.__wrapped__(model.train(), windows[:1]).logits.sum().backward()
    model.gradient_checkpointing_disable()
    model.eval().set_attn_implementation("sdpa")
    read(model, windows[:1])
    assert all(importance is None for importance in importances)


@pytest.mark.parametrize(
    ("options", "reason"), [({"evict": False}, "nothing is left to choose"), ({"prefill": "thrice"}, "exact.*twice")]
)
def test_what_cannot_be_read_twice_is_refused(tiny, windows, options, reason):
    with pytest.raises(dofla.DoflaError, match=reason):
        dofla.compress(tiny.llama(), windows, **{"prefill": "twice"} | options)


def test_more_than_one_text_is_not_read_twice():
    with pytest.raises(dofla.DoflaError, match="prefill is 'twice': BartForConditionalGeneration"):
        dofla.compress(teacher("bart"), size="64KiB", prefill="twice")
