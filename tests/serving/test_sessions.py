"""A conversation gone on with costs its new tokens, and says what it would have said if all were read again."""

from __future__ import annotations

import pytest
import torch
from students import COMPRESSED
from transformers import GenerationConfig

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.serving.sessions import Sessions, keep_sessions

SIZES = {
    "hybrid": {"features": [3, 5], "window": 3, "sinks": 2},
    "compressed": COMPRESSED,
}
ANSWER = 6


@pytest.fixture(params=SIZES)
def pair(tiny, request):
    """A student twice, in float64, where reading in two calls is the same to the token."""
    models = [tiny.llama().double() for _ in range(2)]
    return [dofla.linearize(model, tiny.plan(model, **SIZES[request.param])) for model in models]


def answer(student, ids, **options):
    options = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False} | options
    return student.generate(ids, attention_mask=torch.ones_like(ids), **options)


def test_a_turn_costs_its_own_tokens(pair, tiny):
    student, plain = pair
    sessions = keep_sessions(student)
    text, sizes = tiny.tokens(1, 40), []
    for turn in range(4):
        said = answer(student, text)
        assert torch.equal(said, answer(plain, text))
        # The last token of an answer was written and not read; the last of a prompt is left for generate.
        assert sessions.read == (39 if turn == 0 else 7)
        sizes.append({cache_bytes(cache) for _, cache in sessions._known.values()})
        text = torch.cat([said, tiny.tokens(1, 7, seed=turn)], 1)
    assert len(set.union(*sizes)) == 1  # bytes of a state, whatever was said


def test_an_answer_that_comes_back_in_other_tokens_is_read_again(pair, tiny):
    student, plain = pair
    sessions = keep_sessions(student)
    prompt = tiny.tokens(1, 40)
    said = answer(student, prompt)
    other = torch.cat([prompt, (said[:, 40:] + 1) % 64, tiny.tokens(1, 5, seed=9)], 1)
    assert torch.equal(answer(student, other), answer(plain, other))
    assert sessions.read == other.shape[1] - 1 - 39


def test_the_same_prompt_is_not_read_twice_and_nothing_of_a_session_changes(pair, tiny):
    student, _ = pair
    sessions = keep_sessions(student)
    prompt = tiny.tokens(1, 40)
    first = answer(student, prompt)
    for _ in range(2):
        assert torch.equal(answer(student, prompt), first)
        assert sessions.read == 0


def test_sessions_side_by_side_do_not_mix(pair, tiny):
    student, plain = pair
    keep_sessions(student)
    texts = [tiny.tokens(1, 30, seed=n) for n in range(3)]
    for turn in range(3):
        for n, text in enumerate(texts):
            said = answer(student, text)
            assert torch.equal(said, answer(plain, text))
            texts[n] = torch.cat([said, tiny.tokens(1, 4, seed=10 * turn + n)], 1)


def test_what_was_not_gone_on_with_is_forgotten(pair, tiny):
    student, _ = pair
    sessions = keep_sessions(student, most=2)
    for n in range(5):
        answer(student, tiny.tokens(1, 20, seed=n))
    assert len(sessions) == 4
    answer(student, tiny.tokens(1, 20, seed=4))
    assert sessions.read == 0
    answer(student, tiny.tokens(1, 20, seed=0))
    assert sessions.read == 19


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_several_sequences_pass_through(pair, tiny, options):
    student, _ = pair
    sessions = keep_sessions(student)
    assert answer(student, tiny.tokens(1, 20), **options).shape[1] == 20 + ANSWER
    assert answer(student, tiny.tokens(2, 20)).shape == (2, 20 + ANSWER)
    assert len(sessions) == 0


def test_padding_and_caches_of_their_own_pass_through(pair, tiny):
    student, plain = pair
    sessions = keep_sessions(student)
    ids, mask = tiny.tokens(1, 20), torch.ones(1, 20, dtype=torch.int64)
    mask[:, :5] = 0
    for options in ({"attention_mask": mask}, {"cache_implementation": "static"}):
        options |= {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
        assert torch.equal(student.generate(ids, **options), plain.generate(ids, **options))
    assert len(sessions) == 0


def test_a_prompt_of_one_token_and_a_dictionary_are_answered(pair, tiny):
    student, plain = pair
    keep_sessions(student)
    result = answer(student, tiny.tokens(1, 1), return_dict_in_generate=True)
    assert torch.equal(result.sequences, answer(plain, tiny.tokens(1, 1)))


def test_a_prompt_is_given_in_every_way_that_generate_takes(pair, tiny):
    student, plain = pair
    sessions, ids = keep_sessions(student), tiny.tokens(1, 20)
    wanted = answer(plain, ids)
    config = GenerationConfig(max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
    for options in ({"inputs": ids}, {"input_ids": ids}):
        assert torch.equal(student.generate(**options, generation_config=config), wanted)
    assert len(sessions) == 2
    assert torch.equal(student.generate(ids, config), wanted)


def test_what_cannot_be_is_refused(tiny, pair):
    with pytest.raises(DoflaError, match="sessions: 0; remember 1 or more"):
        Sessions(pair[0], 0)
    with pytest.raises(DoflaError, match="linear"):
        Sessions(tiny.llama())
