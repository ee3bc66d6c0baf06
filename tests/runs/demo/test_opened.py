"""The bundled model, its text and its windows, by a word and in one call."""

import pytest
import torch
from word_tokenizers import word_tokenizer

import dofla
from dofla.data.documents import SAMPLE
from dofla.errors import DoflaError
from dofla.runs.demo.data import demo_windows
from dofla.runs.opening import windows_of
from dofla.runs.recipe import DataSpec, demo_recipes


def test_demo_is_model_tokenizer_and_text(tokenizer):
    model, own, text = dofla.demo()
    assert isinstance(text, str)
    assert own.get_vocab() == tokenizer.get_vocab()
    assert len(own(text, verbose=False)["input_ids"]) > 100_000
    with torch.inference_mode():
        loss = model(ids := own(text[:2000], return_tensors="pt")["input_ids"], labels=ids).loss
    assert loss < 2.5


def test_the_word_demo_opens_the_model_unless_there_is_a_folder_of_this_name(tiny, tmp_path, monkeypatch):
    model = dofla.load("demo")
    weights = dofla.demo()[0].state_dict()
    assert all(torch.equal(weight, weights[name].to(weight)) for name, weight in model.state_dict().items())
    monkeypatch.chdir(tmp_path)
    student = tiny.llama()
    dofla.linear.linearize(student, tiny.plan(student)).save_pretrained("demo")
    assert dofla.load("demo").config.hidden_size == 32


def test_the_sample_has_both_splits_and_nothing_of_the_demos_windows(tokenizer):
    train = dofla.token_windows("sample", tokenizer, windows=12)
    held_out = dofla.token_windows("sample", tokenizer, split="validation")
    assert (len(train), train.length) == (12, 512)
    assert len(held_out) >= 8
    everything = dofla.token_windows("sample", tokenizer, split="all")
    assert len(everything) >= len(held_out) + 200
    text = dofla.demo()[2]
    for window in demo_windows(48, 512, split="validation").input_ids[:, 100:140].tolist():
        assert tokenizer.decode(window) not in text


def test_the_sample_is_a_source_like_any_other(tokenizer, tmp_path):
    (copied := tmp_path / "sample.txt.gz").write_bytes(SAMPLE.read_bytes())
    found, other = (dofla.token_windows(source, tokenizer, length=64, windows=3) for source in ("sample", copied))
    assert torch.equal(found.input_ids, other.input_ids)
    assert found.source == "sample (train)"
    with pytest.raises(dofla.DoflaError, match="no such file"):
        dofla.token_windows("sample.txt", tokenizer)


def test_the_demos_recipes_find_their_windows(tokenizer):
    for recipe in demo_recipes().values():
        for spec in (recipe.data, recipe.validation):
            ids = demo_windows(spec.windows, spec.length, split=spec.split).input_ids
            assert ids.shape == (spec.windows, spec.length)
            assert 0 <= int(ids.min()) <= int(ids.max()) < len(tokenizer)


def test_shorter_windows_are_pieces_and_splits_differ():
    whole, train = demo_windows(split="validation").input_ids, demo_windows().input_ids
    pieces = demo_windows(None, 200, split="validation").input_ids
    assert pieces.shape == (2 * len(whole), 200)
    assert torch.equal(pieces[:2].flatten(), whole[0, :400])
    assert demo_windows(10_000).input_ids.shape == train.shape
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in whole.tolist()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "test"}, "unknown split 'test': choose one of train, validation"),
        ({"length": 513}, "length is 513: the demo's windows have 512 tokens"),
        ({"length": 0}, "length is 0"),
        ({"windows": 0}, "windows is 0"),
    ],
)
def test_windows_that_are_not_there_are_refused(options, words):
    with pytest.raises(dofla.DoflaError, match=words):
        demo_windows(**options)


def test_all_windows_and_those_of_another_tokenizer(tiny):
    whole = demo_windows(split="all").input_ids
    assert torch.equal(whole, torch.cat([demo_windows().input_ids, demo_windows(split="validation").input_ids]))
    with pytest.raises(DoflaError, match="data is demo: the tokens of another tokenizer"):
        windows_of(DataSpec("demo"), tiny.llama(), word_tokenizer())
