"""A linearized model generates as any model does: with the cache as without, alone as in a batch."""

import copy

import pytest
import torch
from arithmetic import LOGITS
from tiny_families import CASES, padded, student, tokens
from torch.testing import assert_close
from transformers import DynamicCache

in_every_case = pytest.mark.parametrize(("family", "kind"), CASES)
FEW = [("gpt2", "plain"), ("llama", "ragged"), ("opt", "eight_bits"), ("bert_decoder", "softmax_first")]
FEW += [("llama", "compressed")]
in_few_cases = pytest.mark.parametrize(("family", "kind"), FEW)
"""Of what transformers does with caches, which knows no families."""

PIECES = [[1] * 10, [5, 1, 2, 70, 1, 3, 19], *([prefill, 1, 1, 1] for prefill in (2, 63, 64, 65))]


@pytest.fixture
def model(family, kind):
    return student(family, kind)


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options})


@torch.no_grad()
def run(model, ids, mask=None, cache=None):
    """Logits of the new tokens ``ids``; ``mask`` covers those in ``cache`` as well."""
    options = {"past_key_values": cache, "use_cache": cache is not None}
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        options |= {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}
    return model(input_ids=ids, **options).logits


@in_every_case
def test_a_text_read_in_pieces_gives_the_logits_of_one_forward_pass(model):
    ids = tokens(2, max(map(sum, PIECES)))
    whole = run(model, ids)
    for sizes in PIECES:
        cache, length = DynamicCache(config=model.config), sum(sizes)
        pieces = [run(model, piece, cache=cache) for piece in ids[:, :length].split(sizes, 1)]
        assert_close(torch.cat(pieces, 1), whole[:, :length], **LOGITS)
        assert cache.get_seq_length() == length


@in_every_case
def test_padding_changes_no_logit(model):
    for side in ("left", "right"):
        alone, ids, mask = padded((30, 17, 4), side)
        logits = run(model, ids, mask)
        for row, sequence in enumerate(alone):
            assert_close(logits[row, mask[row].bool()], run(model, sequence)[0], **LOGITS)


@in_every_case
def test_nor_does_it_in_several_calls(model):
    _, ids, mask = padded((30, 17, 4), "left")
    cache, ends = DynamicCache(config=model.config), (28, 29, 30)
    pieces = [run(model, ids[:, a:b], mask[:, :b], cache) for a, b in zip((0, *ends), ends, strict=False)]
    real = mask.bool()
    assert_close(torch.cat(pieces, 1)[real], run(model, ids, mask)[real], **LOGITS)


@in_every_case
def test_greedy_search_with_cache_is_greedy_search_without(model):
    ids = tokens(2, 9)
    with_cache = generate(model, ids)
    assert with_cache.shape == (2, 15)
    assert_close(with_cache, generate(model, ids, use_cache=False))


@in_few_cases
def test_beam_search_with_cache_is_beam_search_without(model):
    ids = tokens(2, 9)
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    with_cache, without = generate(model, ids, **options), generate(model, ids, **options, use_cache=False)
    assert_close(with_cache.sequences, without.sequences)
    assert_close(with_cache.sequences_scores, without.sequences_scores, **LOGITS)


@in_few_cases
@pytest.mark.parametrize("beams", [1, 2])
def test_a_left_padded_batch_is_each_sequence_alone(model, beams):
    alone, ids, mask = padded((30, 17, 4), "left")
    together = generate(model, ids, attention_mask=mask, num_beams=beams)
    for row, sequence in enumerate(alone):
        expected = generate(model, sequence, num_beams=beams)
        assert_close(together[row, ids.shape[1] :], expected[0, sequence.shape[1] :])


@in_few_cases
def test_a_conversation_of_several_turns_in_one_cache_is_one_generation(model):
    said, answer = tokens(1, 12), tokens(1, 5, seed=2)
    cache = DynamicCache(config=model.config)
    first = generate(model, said, past_key_values=cache)
    conversation = torch.cat([first, answer], 1)
    second = generate(model, conversation, past_key_values=cache)
    assert_close(first, generate(model, said))
    assert_close(second, generate(model, conversation))
    assert cache.get_seq_length() == second.shape[1] - 1


@in_few_cases
def test_a_prompt_read_once_can_be_continued_many_times(model):
    prompt = tokens(1, 12)
    cache = DynamicCache(config=model.config)
    run(model, prompt, cache=cache)
    for seed in (5, 6):
        ids = torch.cat([prompt, tokens(1, 4, seed)], 1)
        assert_close(generate(model, ids, past_key_values=copy.deepcopy(cache)), generate(model, ids))


@in_few_cases
def test_a_prompt_read_in_chunks_is_one_read_at_once(model):
    ids = tokens(2, 30)
    assert_close(generate(model, ids, prefill_chunk_size=7), generate(model, ids))
