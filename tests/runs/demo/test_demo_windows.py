"""The demo's windows, which are bundled."""

from __future__ import annotations

import pytest
import torch

from dofla.runs.demo.data import bundled_path, demo_windows, drawn_windows
from dofla.runs.recipe import Recipe
from dofla.runs.teacher import load_teacher
from dofla.storage.tensors import write_tensors

DEMO = Recipe.load("recipes/demo.yaml")


@pytest.fixture(scope="module")
def teacher():
    return load_teacher("demo")


@pytest.mark.parametrize("spec", [DEMO.data, DEMO.validation], ids=lambda spec: spec.split)
def test_the_demo_draws_nothing(spec, teacher, monkeypatch):
    monkeypatch.setattr("dofla.runs.demo.data.drawn_windows", lambda *_, **__: pytest.fail("drawn"))
    windows = demo_windows(*teacher, spec.windows, spec.length, split=spec.split, seed=DEMO.seeds[0])
    assert windows.input_ids.shape == (spec.windows, spec.length)
    assert int(windows.input_ids.max()) < teacher[0].config.vocab_size


@pytest.mark.parametrize("spec", [DEMO.data, DEMO.validation], ids=lambda spec: spec.split)
def test_what_is_bundled_was_drawn_so(spec, teacher, monkeypatch):
    """All but the samples, which take minutes: the recall documents among them, and their places."""

    def unsampled(source, tokenizer, *, length, windows, **options):
        if source == "self":
            return type("Samples", (), {"input_ids": torch.full((windows, length), -1)})
        return token_windows(source, tokenizer, length=length, windows=windows, **options)

    from dofla.runs.demo.data import token_windows

    monkeypatch.setattr("dofla.runs.demo.data.token_windows", unsampled)
    monkeypatch.setattr("dofla.runs.demo.data.TokenWindows", lambda ids, source: ids)
    size = (spec.windows, spec.length)
    drawn = drawn_windows(*teacher, *size, split=spec.split, seed=0)
    bundled = demo_windows(*teacher, *size, split=spec.split, seed=0)
    recall = (drawn >= 0).all(dim=1)
    assert torch.equal(bundled[recall], drawn[recall])
    assert (bundled[~recall, 0] == teacher[1].bos_token_id).all()  # each sample starts with it


def test_another_model_draws_its_own(tiny, teacher, tmp_path, monkeypatch):
    path = bundled_path(3, 8, "train", 0)
    monkeypatch.setattr("dofla.runs.demo.data.bundled_path", lambda *_: tmp_path / path.name)
    write_tensors(tmp_path / path.name, {"input_ids": torch.full((3, 8), 5, dtype=torch.int16)})
    assert (demo_windows(*teacher, 3, 8).input_ids == 5).all()
    other = tiny.llama(vocab_size=teacher[0].config.vocab_size)
    assert not (demo_windows(other, teacher[1], 3, 8).input_ids == 5).all()
