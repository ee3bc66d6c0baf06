"""A conversation that is continued costs its new tokens, and says what it would have said if all were read again."""

import threading

import pytest
import torch
from sizes import compress
from tiny_families import own_student, teacher
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessor, MiniMaxConfig

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.integration.converted import is_converted
from dofla.serving import Session
from dofla.serving.session import NotOneText

SIZES = {"features": {"features": [3, 5], "window": 3, "sinks": 2}, "compressed": {}, "plain": None}
"""Of feature layers; none for a compressed cache; None leaves the model as it is."""
ANSWER = 6
SHORT = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}


def model_of(tiny, sizes=SIZES["compressed"], **config):
    """In float64, where reading in two calls is the same to the token."""
    model = tiny.llama(**config).double()
    if sizes is None:
        return model
    return dofla.linear.linearize(model, tiny.plan(model, **sizes)) if sizes else tiny.compressed(model)


@pytest.fixture(params=SIZES)
def model(tiny, request):
    return model_of(tiny, SIZES[request.param])


def answer(writer, ids, **options):
    return writer.generate(ids, attention_mask=torch.ones_like(ids), **SHORT | options)


def test_a_turn_costs_its_own_tokens(model, tiny):
    session, text, sizes = Session(model), tiny.tokens(1, 40), []
    for turn in range(3):
        said = answer(session, text)
        assert torch.equal(said, answer(model, text))
        # The last token of an answer was written and not read; the last of a prompt is left for generate.
        assert session.read == (39 if turn == 0 else 7)
        sizes.append({cache_bytes(cache) for _, cache in session._known.values()})
        text = torch.cat([said, tiny.tokens(1, 7, seed=turn)], 1)
    # Bytes of a compressed cache, whatever was said.
    assert (len(set.union(*sizes)) == 1) == is_converted(model)


def test_an_answer_that_returns_in_other_tokens_is_read_again(model, tiny):
    session, prompt = Session(model), tiny.tokens(1, 40)
    said = answer(session, prompt)
    other = torch.cat([prompt, (said[:, 40:] + 1) % 64, tiny.tokens(1, 5, seed=9)], 1)
    assert torch.equal(answer(session, other), answer(model, other))
    assert session.read == other.shape[1] - 1 - 39


def test_the_same_prompt_is_not_read_twice_and_nothing_of_a_conversation_changes(model, tiny):
    session, prompt = Session(model), tiny.tokens(1, 40)
    first = answer(session, prompt)
    for _ in range(2):
        assert torch.equal(answer(session, prompt), first)
        assert session.read == 0


def test_conversations_side_by_side_do_not_mix(model, tiny):
    session, texts = Session(model), [tiny.tokens(1, 30, seed=n) for n in range(2)]
    for turn in range(2):
        for n, text in enumerate(texts):
            said = answer(session, text)
            assert torch.equal(said, answer(model, text))
            texts[n] = torch.cat([said, tiny.tokens(1, 4, seed=10 * turn + n)], 1)


def test_the_least_recently_continued_conversation_is_forgotten(tiny):
    session = Session(model_of(tiny), most=2)
    for n in range(5):
        answer(session, tiny.tokens(1, 20, seed=n))
    assert len(session._known) == 4
    answer(session, tiny.tokens(1, 20, seed=4))
    assert session.read == 0
    answer(session, tiny.tokens(1, 20, seed=0))
    assert session.read == 19


def test_settings_are_given_in_every_way_that_generate_takes(tiny):
    model = model_of(tiny)
    session, ids = Session(model), tiny.tokens(1, 20)
    config = GenerationConfig(**SHORT)
    wanted = answer(model, ids)
    assert torch.equal(session.generate(ids, generation_config=config), wanted)
    assert torch.equal(session.generate(input_ids=ids, generation_config=config, streamer=None), wanted)
    model.generation_config.update(**SHORT)
    assert torch.equal(session.generate(ids), wanted)
    model.generation_config.num_beams = 2
    with pytest.raises(NotOneText, match="beam search"):
        session.generate(ids, generation_config=config)


def test_a_prompt_of_one_token_and_a_dictionary_are_answered(model, tiny):
    result = answer(Session(model), tiny.tokens(1, 1), return_dict_in_generate=True, output_scores=True)
    assert torch.equal(result.sequences, answer(model, tiny.tokens(1, 1)))
    assert len(result.scores) == ANSWER
    assert result.past_key_values is None


def test_a_token_of_padding_that_ends_texts_is_none(tiny):
    model, ids = model_of(tiny), tiny.tokens(1, 20)
    ids[0, :5] = 63
    for options in ({"pad_token_id": 63, "eos_token_id": [62, 63]}, {"pad_token_id": 62, "eos_token_id": 62}):
        ids[ids == 62] = 1
        assert torch.equal(*(x.generate(ids, **options, **SHORT) for x in (Session(model), model)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "the settings ask for beam search"),
        ({"prompt_lookup_num_tokens": 2}, "the settings ask for assisted generation"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.int64)}, r"input_ids has the shape \[2, 5\]"),
        ({"input_ids": torch.ones(5, dtype=torch.int64)}, r"input_ids has the shape \[5\]"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, r"input_ids has the shape \[1, 0\]"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention_mask is not all ones"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask is not all ones"),
        ({"pad_token_id": 3}, "token 3 is padding where no attention_mask is given"),
        ({"past_key_values": DynamicCache()}, "past_key_values is given"),
        ({"cache": DynamicCache()}, "cache is given"),
        ({"cache_implementation": "static"}, "cache_implementation is static"),
        ({"use_cache": False}, "use_cache is False"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache is False"),
        ({"position_ids": torch.arange(3)[None] + 50}, "position_ids is given"),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "pixel_values is given"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        ({"output_hidden_states": True}, "output_hidden_states is True"),
    ],
)
def test_what_is_more_than_one_text_is_refused(tiny, options, said):
    session = Session(model_of(tiny))
    with pytest.raises(DoflaError, match=f"a session continues one text, and {said}: call model.generate"):
        session.generate(**{"input_ids": torch.tensor([[3, 4, 5]]), **SHORT, **options})
    assert not session._known


def test_softmax_attention_does_not_go_on_from_a_compressed_cache(tiny):
    model, ids = model_of(tiny), tiny.tokens(1, 20)
    session = Session(model)
    answer(session, ids)
    with dofla.original(model), pytest.raises(DoflaError, match="start with a fresh cache"):
        answer(session, ids)


def test_after_a_reset_all_is_read_again(model, tiny):
    session, ids = Session(model), tiny.tokens(1, 20)
    said = answer(session, ids)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    session.reset()
    assert torch.equal(answer(session, said), answer(model, said))
    assert session.read == said.shape[1] - 1


def test_what_is_read_while_it_is_reset_is_not_remembered(tiny):
    session, ids = Session(model_of(tiny)), tiny.tokens(1, 20)
    reached, done = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        def __call__(self, input_ids, scores):
            reached.set()
            assert done.wait(60)
            return scores

    writer = threading.Thread(target=answer, args=(session, ids), kwargs={"logits_processor": [Waits()]})
    writer.start()
    assert reached.wait(60)
    session.reset()
    done.set()
    writer.join()
    answer(session, ids)
    assert session.read == 19


def test_what_keeps_no_states_has_no_session(tiny):
    with pytest.raises(DoflaError, match="most is 0: give 1 or more"):
        Session(tiny.llama(), 0)
    with pytest.raises(DoflaError, match="BertModel writes no text"):
        Session(dofla.linear.linearize(tiny.bert()))
    sizes = {"vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "head_dim": 8}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = MiniMaxConfig(**sizes, block_size=16, num_local_experts=2, initializer_range=0.3)
    exotic = AutoModelForCausalLM.from_config(config).eval()
    own_kind = compress(exotic, tiny.tokens(6, 64), tokens=48, head_budgets="even")
    for model, why in (
        (own_student("bart", "softmax_first"), "is an encoder-d"),
        (own_kind, "a cache of its own kind"),
    ):
        for read in (Session, dofla.serving.Stream, lambda x: dofla.serving.read_prompt(x, tiny.tokens(1, 20))):
            with pytest.raises(DoflaError, match=why):
                read(model)


def test_conversations_in_a_folder_go_on_in_another_session(model, tiny, tmp_path, caplog):
    folder = tmp_path / "sessions"
    if not is_converted(model):
        with pytest.raises(DoflaError, match="sessions: layer 0 is not compressed"):
            Session(model, folder=folder)
        compressed = compress(model, tiny.tokens(4, 64), 24, keep_softmax=["model.layers.0.self_attn"])
        with pytest.raises(DoflaError, match="sessions: layer 0 is not compressed"):
            Session(compressed, folder=folder)
        return
    first, texts = Session(model, folder=folder), [tiny.tokens(1, 40), tiny.tokens(1, 30, seed=5)]
    for _ in range(2):
        texts = [torch.cat([answer(first, text), tiny.tokens(1, 7)], 1) for text in texts]
    files = sorted(folder.iterdir())
    assert len(files) == 2
    files.append(folder / "half.safetensors")
    files[2].write_bytes(files[0].read_bytes()[:500])
    second = Session(model, folder=folder)
    assert f"passed over: {files[2]}" in caplog.text
    for text in texts:
        assert torch.equal(answer(second, text), answer(model, text))
        assert second.read == 7
    assert sorted(folder.iterdir()) == sorted(files)
    branch = torch.cat([texts[0], tiny.tokens(1, 3, seed=8)], 1)  # from what is now the state after a longer text
    assert torch.equal(answer(second, branch), answer(model, branch))
    assert len(list(folder.iterdir())) == 4
    (folder / "anna.safetensors").write_bytes(files[0].read_bytes())  # named by somebody
    few = Session(model, most=1, folder=folder)
    for text in (*texts, texts[0]):
        answer(few, text)
    assert len(few._files) == 1
    assert (folder / "anna.safetensors").exists()
    assert len(list(folder.iterdir())) <= 6


def test_a_folder_that_cannot_be_written_leaves_the_answer(tiny, tmp_path, caplog):
    model, text = model_of(tiny), tiny.tokens(1, 20)
    (tmp_path / "file").touch()
    assert torch.equal(answer(Session(model, folder=tmp_path / "file" / "sessions"), text), answer(model, text))
    assert "sessions" in caplog.text


def test_a_file_of_another_calibration_is_passed_over(tiny, tmp_path, caplog):
    text = tiny.tokens(1, 40)
    answer(Session(compress(tiny.llama(), tiny.tokens(4, 64), 24), folder=tmp_path), text)
    other = Session(compress(tiny.llama(seed=1), tiny.tokens(4, 64), 24), folder=tmp_path)
    assert "passed over" in caplog.text
    assert not other._files


def test_a_folder_is_refused_where_a_layer_keeps_keys(tmp_path):
    config = teacher("gemma3").config
    config.head_dim = 8
    model = compress(AutoModelForCausalLM.from_config(config), torch.randint(3, 60, (4, 64)), 24)
    with pytest.raises(DoflaError, match=r"layer 0 is not compressed \(kept softmax, with a sliding"):
        Session(model, folder=tmp_path)


def test_a_token_that_the_model_does_not_know_is_refused_wherever_it_stands(model):
    session = Session(model)
    for text in ([[99, 5, 6]], [[5, 99, 6]], [[5, 6, 99]]):
        with pytest.raises(DoflaError, match="token 99, and LlamaForCausalLM knows 0 to 63"):
            answer(session, torch.tensor(text))


def test_a_reset_removes_files_of_states_that_no_weights_fit(tiny, tmp_path):
    model, text = model_of(tiny), tiny.tokens(1, 20)
    session = Session(model, folder=tmp_path)
    answer(session, text)
    (tmp_path / "anna.safetensors").write_bytes(next(tmp_path.iterdir()).read_bytes())
    session.reset()
    assert [path.name for path in tmp_path.iterdir()] == ["anna.safetensors"]
    answer(session, text)
    assert len(list(tmp_path.iterdir())) == 2
