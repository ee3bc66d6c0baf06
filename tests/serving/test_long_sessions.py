"""A conversation that is longer than its model has positions goes on, in the bytes of one state."""

from __future__ import annotations

import pytest
import torch
from students import COMPRESSED
from transformers import GenerationConfig

import dofla
from dofla.integration.cache import cache_bytes
from dofla.integration.positions import restart_index

pytestmark = pytest.mark.slow

POSITIONS, AGAIN, ANSWER = 64, 16, 6
SIZES = {"hybrid": {"features": [3, 5], "window": 3, "sinks": 2}, "compressed": COMPRESSED}


@pytest.fixture(params=SIZES)
def pair(tiny, request):
    """A student twice, in float64, where reading in two calls is the same to the token."""
    models = [tiny.llama(max_position_embeddings=POSITIONS).double() for _ in range(2)]
    return [dofla.linearize(model, tiny.plan(model, **SIZES[request.param])) for model in models]


def answer(student, ids, tokens=ANSWER, **options):
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False} | options
    return student.generate(ids, attention_mask=torch.ones_like(ids), **options)


def of_the_end(plain, text, begun, tokens=ANSWER):
    """The text, and what a student writes that knows it from ``begun`` on."""
    return torch.cat([text[:, :begun], answer(plain, text[:, begun:], tokens)], 1)


@pytest.mark.parametrize("static", [False, True])
def test_a_conversation_begins_a_state_anew_before_positions_end(pair, tiny, static):
    student, plain = pair
    sessions = dofla.keep_sessions(student, static=static)
    text, known, begun, sizes, anew = tiny.tokens(1, 30), 0, 0, set(), 0
    for turn in range(14):
        length = text.shape[1]
        if length + ANSWER - begun > POSITIONS:
            begun, anew = known - AGAIN, anew + 1
            read = length - 1 - begun
        else:
            read = length - 1 - known
        said = answer(student, text)
        assert torch.equal(said, of_the_end(plain, text, begun))
        assert sessions.read == read
        sizes |= {cache_bytes(cache) for _, cache in sessions._known.values()}
        known = said.shape[1] - 1  # the last token of an answer is written and not read
        text = torch.cat([said, tiny.tokens(1, 5, seed=turn)], 1)
    assert text.shape[1] > 2 * POSITIONS
    assert anew > 2
    assert len(sizes) == 1


@pytest.mark.parametrize("length", [59, 64, 65, 200])
def test_of_a_prompt_that_is_too_long_the_end_is_read(pair, tiny, length):
    student, plain = pair
    sessions, text = dofla.keep_sessions(student), tiny.tokens(1, length)
    for read in (POSITIONS - ANSWER - 1, 0):
        assert torch.equal(answer(student, text), of_the_end(plain, text, length + ANSWER - POSITIONS))
        assert sessions.read == read


def test_as_long_as_positions_last_nothing_is_read_again(pair, tiny):
    student, plain = pair
    sessions, text = dofla.keep_sessions(student), tiny.tokens(1, POSITIONS - ANSWER)
    assert torch.equal(answer(student, text), answer(plain, text))
    assert sessions.read == POSITIONS - ANSWER - 1


def test_an_answer_has_half_the_positions_and_ends_with_them(pair, tiny, caplog):
    student, plain = pair
    dofla.keep_sessions(student)
    short, long = tiny.tokens(1, 20), tiny.tokens(1, 50)
    assert torch.equal(answer(student, short, 100), answer(plain, short, POSITIONS - 20))
    assert torch.equal(answer(student, long, 100), of_the_end(plain, long, 50 - POSITIONS // 2, POSITIONS // 2))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("dofla")]
    assert said == [f"max_new_tokens: 100, and positions end after {room}: so will the answer" for room in (44, 32)]


def test_lengths_are_given_in_every_way_that_generate_takes(pair, tiny):
    student, plain = pair
    dofla.keep_sessions(student)
    text = tiny.tokens(1, 90)
    wanted = of_the_end(plain, text, 90 + ANSWER - POSITIONS)
    own = {"do_sample": False, "min_new_tokens": ANSWER}
    config = GenerationConfig(max_new_tokens=ANSWER, **own)
    for options in (
        {"inputs": text, "max_length": 90 + ANSWER, **own},
        {"input_ids": text, "generation_config": config},
        {"inputs": text, "generation_config": GenerationConfig(max_length=90 + ANSWER, **own)},
    ):
        assert torch.equal(student.generate(**options), wanted)
        result = student.generate(**options, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(result.sequences, wanted)
        assert len(result.scores) == ANSWER
    assert config.max_new_tokens == ANSWER
    assert student.generate(text, do_sample=False, min_new_tokens=20).shape == (1, 110)  # transformers' own number


def test_a_model_with_learned_positions_goes_on_as_well(tiny):
    model = tiny.gpt2(n_positions=POSITIONS).double()
    student = dofla.linearize(model, tiny.plan(model, 4, window=3, sinks=2))
    dofla.keep_sessions(student)
    text = tiny.tokens(1, 100)
    for turn in range(4):
        text = torch.cat([answer(student, text), tiny.tokens(1, 10, seed=turn)], 1)
    assert text.shape == (1, 164)


@pytest.mark.parametrize("softmax", [False, True])
def test_generate_alone_warns_when_positions_end(tiny, caplog, softmax):
    model = tiny.llama(max_position_embeddings=POSITIONS)
    plan = tiny.plan(model, 4)
    plan.layers[0].keep_softmax = softmax
    student = dofla.linearize(model, plan)
    answer(student, tiny.tokens(1, POSITIONS - 1), 2)  # its last token is not read
    assert not [record for record in caplog.records if record.name.startswith("dofla")]
    answer(student, tiny.tokens(2, POSITIONS - 2), 6)
    (record,) = (record for record in caplog.records if record.name.startswith("dofla"))
    assert f"past the {POSITIONS} positions" in record.getMessage()
    assert "dofla.keep_sessions" in record.getMessage()


def test_a_memory_made_for_fewer_positions_ends_with_them(tiny, caplog):
    """As one of a model that has no more."""
    few, more = tiny.llama(max_position_embeddings=POSITIONS), tiny.llama(max_position_embeddings=4 * POSITIONS)
    plan = tiny.plan(more, **SIZES["compressed"])
    plan.context = POSITIONS
    plain, student = dofla.linearize(few, tiny.plan(few, **SIZES["compressed"])), dofla.linearize(more, plan)
    answer(student, tiny.tokens(1, POSITIONS - 1), 6)
    (record,) = (record for record in caplog.records if record.name.startswith("dofla"))
    assert f"past the {POSITIONS} positions" in record.getMessage()
    text = tiny.tokens(1, 100)
    for model in (plain, student):
        dofla.keep_sessions(model)
    assert torch.equal(answer(student, text), answer(plain, text))


@pytest.mark.parametrize(
    ("begun", "read", "length", "first"),
    [
        (0, 0, 64, 0),
        (0, 60, 64, 0),
        (0, 0, 65, 1),
        (0, 60, 70, 44),
        (10, 60, 74, 10),
        (10, 60, 75, 44),
        (0, 60, 300, 236),
    ],
)
def test_a_state_begins_where_it_began_or_with_what_is_read_again(begun, read, length, first):
    assert restart_index(begun, read, length, POSITIONS, AGAIN) == first
