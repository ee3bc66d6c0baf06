"""The bundled model and text, by a word and in one call."""

from __future__ import annotations

import pytest
import torch

import dofla
from dofla.data.documents import SAMPLE
from dofla.runs.demo.data import demo_windows


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
    (tmp_path / "sample.txt.gz").write_bytes(SAMPLE.read_bytes())
    found = dofla.token_windows("sample", tokenizer, length=64, windows=3)
    assert torch.equal(
        found.input_ids, dofla.token_windows(tmp_path / "sample.txt.gz", tokenizer, length=64, windows=3).input_ids
    )
    assert found.source == "sample (train)"
    with pytest.raises(dofla.DoflaError, match="no such file"):
        dofla.token_windows("sample.txt", tokenizer)
