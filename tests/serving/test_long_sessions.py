"""A conversation that is longer than its model has positions goes on, in the bytes of one state."""

import pytest
import torch
from students import keep_softmax
from test_session import ANSWER, SHORT, SIZES, answer, model_of
from transformers import CompileConfig, GenerationConfig

import dofla
from dofla.integration.cache import cache_bytes
from dofla.integration.converted import is_converted
from dofla.integration.positions import restart_index
from dofla.integration.surgery import convert
from dofla.serving import CompiledModel, Session

pytestmark = pytest.mark.slow

POSITIONS, AGAIN = 64, 16


@pytest.fixture(params=SIZES)
def model(tiny, request):
    return model_of(tiny, SIZES[request.param], max_position_embeddings=POSITIONS)


def several(tokens):
    return {"max_new_tokens": tokens, "min_new_tokens": tokens}


def of_the_end(model, text, begun, tokens=ANSWER):
    """The text, and what a model writes that knows it from ``begun`` on."""
    return torch.cat([text[:, :begun], answer(model, text[:, begun:], **several(tokens))], 1)


def conversation(session, model, tiny):
    """Many turns, in which a state begins anew before positions end; the sizes of caches."""
    text, known, begun, sizes, anew = tiny.tokens(1, 30), 0, 0, set(), 0
    for turn in range(14):
        length = text.shape[1]
        if length + ANSWER - begun > POSITIONS:
            begun, anew = known - AGAIN, anew + 1
            read = length - 1 - begun
        else:
            read = length - 1 - known
        said = answer(session, text)
        assert torch.equal(said, of_the_end(model, text, begun))
        assert session.read == read
        sizes |= {cache_bytes(cache) for _, cache in session._known.values()}
        known = said.shape[1] - 1  # the last token of an answer is written and not read
        text = torch.cat([said, tiny.tokens(1, 5, seed=turn)], 1)
    assert text.shape[1] > 2 * POSITIONS
    assert anew > 2
    return sizes


def test_a_conversation_begins_a_state_anew_before_positions_end(model, tiny):
    sizes = conversation(Session(model), model, tiny)
    assert (len(sizes) == 1) == is_converted(model)


def test_a_compiled_model_does_as_well(tiny):
    model = model_of(tiny, max_position_embeddings=POSITIONS)
    compiled = CompiledModel(model, CompileConfig(backend="eager"))
    assert len(conversation(Session(compiled), model, tiny)) == 1


@pytest.mark.parametrize("length", [59, 64, 65, 200])
def test_of_a_prompt_that_is_too_long_the_end_is_read(model, tiny, length):
    session, text = Session(model), tiny.tokens(1, length)
    for read in (POSITIONS - ANSWER - 1, 0):
        assert torch.equal(answer(session, text), of_the_end(model, text, length + ANSWER - POSITIONS))
        assert session.read == read


def test_an_answer_has_half_the_positions_and_ends_with_them(model, tiny, caplog):
    session, short, long = Session(model), tiny.tokens(1, 20), tiny.tokens(1, 50)
    assert torch.equal(answer(session, short, **several(100)), answer(model, short, **several(POSITIONS - 20)))
    half = POSITIONS // 2
    assert torch.equal(answer(session, long, **several(100)), of_the_end(model, long, 50 - half, half))
    said = [record.getMessage() for record in caplog.records if record.name == "dofla.serving.session"]
    assert said == [f"max_new_tokens: 100, and positions end after {room}: so will the answer" for room in (44, 32)]


def test_lengths_are_given_in_every_way_that_generate_takes(model, tiny):
    session, text, config = Session(model), tiny.tokens(1, 90), GenerationConfig(**SHORT)
    wanted = of_the_end(model, text, 90 + ANSWER - POSITIONS)
    for options in ({"max_length": 90 + ANSWER, "min_length": 90 + ANSWER}, {"generation_config": config}):
        assert torch.equal(session.generate(text, **options), wanted)
    assert config.max_new_tokens == ANSWER
    assert session.generate(text, min_new_tokens=20).shape == (1, 110)  # transformers' own number


def test_a_model_with_learned_positions_goes_on_as_well(tiny):
    model = tiny.gpt2(n_positions=POSITIONS).double()
    session = Session(dofla.linear.linearize(model, tiny.plan(model, 4, window=3, sinks=2)))
    text = tiny.tokens(1, 100)
    for turn in range(4):
        text = torch.cat([answer(session, text), tiny.tokens(1, 10, seed=turn)], 1)
    assert text.shape == (1, 164)


def said_by(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("dofla")]


@pytest.mark.parametrize("softmax", [False, True])
def test_generate_alone_warns_when_positions_end(tiny, caplog, softmax):
    model = tiny.llama(max_position_embeddings=POSITIONS)
    plan = tiny.plan(model, 4)
    dofla.linear.linearize(model, keep_softmax(plan, *[0] * softmax))
    answer(model, tiny.tokens(1, POSITIONS - 1), **several(2))  # its last token is not read
    assert not said_by(caplog)
    answer(model, tiny.tokens(2, POSITIONS - 2))
    (said,) = said_by(caplog)
    assert f"past the {POSITIONS} positions" in said
    assert "dofla.serving.Session" in said


def test_a_memory_made_for_fewer_positions_ends_with_them(tiny, caplog):
    """As one of a model that has no more."""
    few, more = tiny.llama(max_position_embeddings=POSITIONS), tiny.llama(max_position_embeddings=4 * POSITIONS)
    plan = tiny.compressed_plan(more)
    plan.context = POSITIONS
    models = tiny.compressed(few), convert(more, plan).model
    answer(models[1], tiny.tokens(1, POSITIONS - 1))
    (said,) = said_by(caplog)
    assert f"past the {POSITIONS} positions" in said
    assert torch.equal(*(answer(Session(model), tiny.tokens(1, 100)) for model in models))


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
