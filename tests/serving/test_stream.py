"""A stream goes on past the positions of its model, in the bytes of one state."""

import pytest
import torch
from test_session import SIZES, model_of

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.integration.converted import is_converted
from dofla.integration.surgery import convert
from dofla.serving import Stream

POSITIONS, OVERLAP = 32, 8


@pytest.fixture(params=SIZES)
def model(tiny, request):
    return model_of(tiny, SIZES[request.param], max_position_embeddings=POSITIONS)


@torch.no_grad()
def test_what_has_positions_is_read_into_one_state(model, tiny):
    ids, stream = tiny.tokens(2, POSITIONS), Stream(model, OVERLAP)
    logits = torch.cat([stream.read(piece) for piece in ids.split([5, 1, 26], dim=1)], 1)
    assert torch.allclose(logits, model(ids).logits)
    assert torch.equal(stream.ids, ids)
    assert stream.tokens == POSITIONS


@torch.no_grad()
def test_what_has_none_begins_a_state_with_what_stood_before_it(model, tiny):
    ids, stream, held = tiny.tokens(2, 100), Stream(model, OVERLAP), set()
    for first in range(0, 100, 10):
        logits = stream.read(ids[:, first : first + 10])
        # Of 32 positions a first state reads 30 tokens, any other 8 again and then 20.
        begun = 0 if first < 30 else first - (first - 30) % 20 - OVERLAP
        assert torch.equal(stream.ids, ids[:, begun : first + 10])
        assert torch.allclose(logits, model(stream.ids).logits[:, -10:])
        held.add(cache_bytes(stream.cache))
    assert len(held) == 1 or not is_converted(model)
    assert stream.tokens == 100


@torch.no_grad()
def test_more_than_a_state_has_room_for_is_read_as_if_in_several_calls(model, tiny):
    ids, room = tiny.tokens(1, 100), POSITIONS - OVERLAP
    whole, parts = Stream(model, OVERLAP), Stream(model, OVERLAP)
    logits = torch.cat([parts.read(piece) for piece in ids.split(room, dim=1)], 1)
    assert torch.equal(whole.read(ids), logits)
    assert torch.equal(whole.ids, parts.ids)


@torch.no_grad()
def test_a_model_with_learned_positions_reads_on_as_well(tiny):
    model = tiny.gpt2(n_positions=POSITIONS).double()
    stream = Stream(dofla.linear.linearize(model, tiny.plan(model, 4, window=3, sinks=2)))
    assert stream.overlap == POSITIONS // 4
    assert stream.read(tiny.tokens(1, 100)).shape == (1, 100, 64)


def test_a_memory_for_fewer_positions_begins_anew_before_they_end(tiny, tmp_path):
    base = tiny.llama()
    base.save_pretrained(tmp_path / "base")
    plan = tiny.compressed_plan(base)
    plan.context = POSITIONS
    dofla.save_adapter(convert(base, plan).model, tmp_path / "adapter")
    opened = dofla.load(tmp_path / "adapter", base_model=tmp_path / "base")
    assert Stream(opened).positions == POSITIONS
    assert Stream(opened, positions=2 * POSITIONS).positions == 2 * POSITIONS  # if that is asked for


def test_generate_goes_on_from_a_stream(model, tiny):
    stream, ids = Stream(model, OVERLAP), tiny.tokens(1, 61)
    stream.read(ids[:, :60])
    text = torch.cat([stream.ids, ids[:, 60:]], 1)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(text)}
    assert torch.equal(model.generate(text, past_key_values=stream.cache, **options), model.generate(text, **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlap": 0}, "overlap: 0; give 1 to 31, with 32 positions"),
        ({"overlap": 32}, "overlap: 32; give 1 to 31"),
        ({"positions": 33}, "positions: 33; give 2 to 32"),
        ({"positions": 0}, "positions: 0; give 2 to 32"),
    ],
)
def test_numbers_out_of_range_are_refused(model, options, said):
    with pytest.raises(DoflaError, match=said):
        Stream(model, **options)


def test_what_cannot_be_read_is_refused_and_nothing_is_read_of_it(model, tiny):
    stream = Stream(model, OVERLAP)
    stream.read(tiny.tokens(1, 5))
    unknown = tiny.tokens(1, 50)
    unknown[0, 40] = 64
    for ids, said in ((unknown, "token 64"), (tiny.tokens(2, 5), "2 sequences, and it began with 1")):
        with pytest.raises(DoflaError, match=said):
            stream.read(ids)
    with pytest.raises(DoflaError, match="expected tokens"):
        stream.read(tiny.tokens(1, 0))
    assert stream.tokens == 5
