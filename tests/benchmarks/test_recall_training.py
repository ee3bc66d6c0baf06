"""``benchmarks/quality/recall_training.py``: documents hold what they ask for, and take the place of some windows."""

from __future__ import annotations

import re

import pytest
import torch
from benches import scripts

import dofla


@pytest.fixture(scope="module")
def benchmark():
    with scripts("quality", "compressed", "recall_training") as (_, module):
        yield module


@pytest.fixture
def writer(benchmark, tokenizer):
    words = [word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{4,8}", word)]
    return benchmark.Writer(tokenizer, tokenizer.encode(". ".join(words), add_special_tokens=False))


def test_a_document_asks_for_its_needles_and_tells_them_again(benchmark, writer, tokenizer):
    ids = benchmark.document(writer, 700, seed=0)
    told = re.findall(r"magic numbers for (\w+) is: (\d+)\.", tokenizer.decode(ids))
    asked = re.findall(r"for (\w+) mentioned in the provided text is (\d+)\.", tokenizer.decode(ids))
    assert len(ids) == 700
    assert len(told) == benchmark.NEEDLES
    assert told == asked
    assert ids != benchmark.document(writer, 700, seed=1)


@pytest.mark.parametrize(("share", "changed"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_documents_take_the_place_of_a_share_of_the_windows(benchmark, writer, tiny, share, changed):
    prose = dofla.TokenWindows(tiny.tokens(4, 700))
    read = benchmark.mixed(prose, writer, share, seed=0)
    assert (read.input_ids != prose.input_ids).any(dim=1).sum() == changed
    assert torch.equal(read.input_ids, benchmark.mixed(prose, writer, share, seed=0).input_ids)


def test_the_command_prints_a_column_of_each_student(benchmark, writer, tiny, tokenizer, tmp_path, monkeypatch, capsys):
    model = tiny.llama(vocab_size=len(tokenizer), head_dim=64, max_position_embeddings=1024)
    monkeypatch.setattr(benchmark, "load_teacher", lambda *_: (model, tokenizer))
    monkeypatch.setattr(benchmark, "all_tokens", lambda *_: writer.text)
    monkeypatch.setattr(benchmark, "Writer", lambda *_: writer)
    monkeypatch.setattr(benchmark, "sources", lambda *_: {"prose": tmp_path})
    monkeypatch.setattr(dofla, "token_windows", lambda *_, **__: dofla.TokenWindows(tiny.tokens(2, 600)))
    options = {
        "budget": 24,
        "length": 600,
        "steps": 1,
        "windows": 1,
        "questions": 2,
        "asked_length": [150],
        "share": [0.5],
    }
    saved = tmp_path / "students"
    benchmark.main("model", tmp_path, tmp_path, seeds=2, out=tmp_path / "found.json", save=saved, **options)
    printed = capsys.readouterr().out
    for word in ("at once", "50% documents", "prose, loss increase", "found in 150", "±"):
        assert word in printed
    assert (tmp_path / "found.json").exists()
    assert {folder.name for folder in saved.iterdir()} == {"50% documents, 0", "50% documents, 1"}
