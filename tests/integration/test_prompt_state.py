"""A prompt's state saved and gone on from is the same as reading the prompt again."""

from __future__ import annotations

import pytest
import torch

import dofla
from dofla.integration.cache import cache_bytes


@pytest.fixture
def student(tiny):
    model = tiny.llama()
    dofla.linearize(model, tiny.plan(model, features=[3, 5], window=3, sinks=2))
    return model


def test_questions_about_a_saved_document_are_answered_as_with_the_document_before_them(student, tmp_path):
    generator = torch.Generator().manual_seed(0)
    vocabulary = student.config.vocab_size
    document = torch.randint(1, vocabulary, (1, 90), generator=generator)
    path = tmp_path / "document.safetensors"
    dofla.save_state(dofla.read_prompt(student, document, chunk=16), document, path, student)
    for _ in range(3):
        question = torch.randint(1, vocabulary, (1, 7), generator=generator)
        prompt, cache = dofla.load_state(path, student)
        whole = torch.cat([prompt, question], dim=1)
        options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(whole)}
        size = cache_bytes(cache)
        answer = student.generate(whole, past_key_values=cache, **options)
        assert torch.equal(answer, student.generate(whole, **options))
        assert cache_bytes(cache) == size


def test_a_state_of_another_plan_or_a_damaged_one_is_refused_by_name(student, tiny, tmp_path):
    document = torch.arange(1, 11).unsqueeze(0)
    path = tmp_path / "document.safetensors"
    dofla.save_state(dofla.read_prompt(student, document), document, path, student)
    other = tiny.llama()
    dofla.linearize(other, tiny.plan(other, features=4))
    with pytest.raises(dofla.DoflaError, match=r"document\.safetensors was written by a student of another plan"):
        dofla.load_state(path, other)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(dofla.DoflaError, match=r"document\.safetensors is no readable prompt state"):
        dofla.load_state(path, student)
    with pytest.raises(dofla.DoflaError, match="does not exist"):
        dofla.load_state(tmp_path / "missing", student)


def test_a_layer_kept_softmax_cannot_be_saved(tiny, tmp_path):
    model = tiny.llama()
    plan = tiny.plan(model, features=4)
    plan.layers[0].keep_softmax = True
    dofla.linearize(model, plan)
    document = torch.arange(1, 11).unsqueeze(0)
    with pytest.raises(dofla.DoflaError, match="layer 0 has no linear-attention state"):
        dofla.save_state(dofla.read_prompt(model, document), document, tmp_path / "state", model)
