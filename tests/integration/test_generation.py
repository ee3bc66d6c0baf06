"""A linearized model generates as any model does: with the cache as without, alone as in a batch."""

import copy

import pytest
import torch
from arithmetic import LOGITS
from tiny_families import CASES, student, tokens
from torch.testing import assert_close
from transformers import DynamicCache

pytestmark = [pytest.mark.parametrize(("family", "kind"), CASES)]

PREFILLS = (1, 2, 63, 64, 65, 200)


@pytest.fixture
def model(family, kind):
    return student(family, kind)


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options})


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def run(model, ids, mask=None, cache=None):
    """Logits of the new tokens ``ids``; ``mask`` covers those in ``cache`` as well."""
    if mask is None:
        return model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
    where = positions(mask)[:, -ids.shape[1] :]
    return model(
        input_ids=ids, attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=cache is not None
    ).logits


def padded(lengths, side):
    """Sequences of these lengths, and the batch of them with its mask."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    alone = [tokens(1, length, seed=length) for length in lengths]
    for row, sequence in enumerate(alone):
        place = slice(longest - sequence.shape[1], longest) if side == "left" else slice(0, sequence.shape[1])
        ids[row, place], mask[row, place] = sequence[0], 1
    return alone, ids, mask


def test_prefill_and_single_steps_give_the_logits_of_one_forward_pass(model):
    ids = tokens(2, max(PREFILLS) + 3)
    whole = run(model, ids)
    for length in PREFILLS:
        cache = DynamicCache(config=model.config)
        pieces = [
            run(model, piece, cache=cache) for piece in (ids[:, :length], *ids[:, length : length + 3].split(1, 1))
        ]
        assert_close(torch.cat(pieces, 1), whole[:, : length + 3], **LOGITS)
        assert cache.get_seq_length() == length + 3


def test_token_by_token_from_the_first_gives_the_logits_of_one_forward_pass(model):
    ids = tokens(2, 40)
    cache = DynamicCache(config=model.config)
    assert_close(torch.cat([run(model, piece, cache=cache) for piece in ids.split(1, 1)], 1), run(model, ids), **LOGITS)


def test_several_tokens_at_a_time_give_the_logits_of_one_forward_pass(model):
    ids = tokens(2, 101)
    cache = DynamicCache(config=model.config)
    pieces = [run(model, piece, cache=cache) for piece in ids.split([5, 1, 2, 70, 1, 3, 19], 1)]
    assert_close(torch.cat(pieces, 1), run(model, ids), **LOGITS)


def test_several_tokens_at_a_time_with_left_padding_do_too(model):
    _, ids, mask = padded([30, 17, 4], "left")
    cache = DynamicCache(config=model.config)
    ends = (28, 29, 30)
    pieces = [run(model, ids[:, a:b], mask[:, :b], cache) for a, b in zip((0, *ends), ends, strict=False)]
    real = mask.bool()
    assert_close(torch.cat(pieces, 1)[real], run(model, ids, mask)[real], **LOGITS)


def test_greedy_search_with_cache_is_greedy_search_without(model):
    ids = tokens(2, 9)
    with_cache = generate(model, ids, max_new_tokens=12)
    assert with_cache.shape == (2, 21)
    assert_close(with_cache, generate(model, ids, max_new_tokens=12, use_cache=False))


def test_beam_search_with_cache_is_beam_search_without(model):
    ids = tokens(2, 9)
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    with_cache, without = generate(model, ids, **options), generate(model, ids, **options, use_cache=False)
    assert_close(with_cache.sequences, without.sequences)
    assert_close(with_cache.sequences_scores, without.sequences_scores, **LOGITS)


def test_sampling_with_cache_is_sampling_without(model):
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(generate(model, tokens(2, 9), do_sample=True, num_return_sequences=2, use_cache=use_cache))
    assert_close(drawn[0], drawn[1])


def test_a_left_padded_batch_is_each_sequence_alone(model):
    alone, ids, mask = padded([30, 17, 4], "left")
    logits = run(model, ids, mask)
    together = generate(model, ids, attention_mask=mask)
    beams = generate(model, ids, attention_mask=mask, num_beams=2)
    for row, sequence in enumerate(alone):
        assert_close(logits[row, mask[row].bool()], run(model, sequence)[0], **LOGITS)
        assert_close(together[row, ids.shape[1] :], generate(model, sequence)[0, sequence.shape[1] :])
        assert_close(beams[row, ids.shape[1] :], generate(model, sequence, num_beams=2)[0, sequence.shape[1] :])


def test_right_padding_changes_no_logit(model):
    alone, ids, mask = padded([30, 17, 4], "right")
    logits = run(model, ids, mask)
    for row, sequence in enumerate(alone):
        assert_close(logits[row, mask[row].bool()], run(model, sequence)[0], **LOGITS)


def test_a_conversation_of_several_turns_in_one_cache_is_one_generation(model):
    said, answer = tokens(1, 12), tokens(1, 5, seed=2)
    cache = DynamicCache(config=model.config)
    first = generate(model, said, past_key_values=cache)
    conversation = torch.cat([first, answer], 1)
    second = generate(model, conversation, past_key_values=cache)
    assert_close(first, generate(model, said))
    assert_close(second, generate(model, conversation))
    assert cache.get_seq_length() == second.shape[1] - 1


def test_a_prompt_read_once_can_be_continued_many_times(model):
    prompt = tokens(1, 12)
    cache = DynamicCache(config=model.config)
    run(model, prompt, cache=cache)
    for seed in (5, 6):
        ids = torch.cat([prompt, tokens(1, 4, seed)], 1)
        assert_close(generate(model, ids, past_key_values=copy.deepcopy(cache)), generate(model, ids))


def test_a_prompt_read_in_chunks_is_one_read_at_once(model):
    ids = tokens(2, 30)
    assert_close(generate(model, ids, prefill_chunk_size=7), generate(model, ids))
