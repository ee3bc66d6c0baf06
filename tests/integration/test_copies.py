"""What was done to a student's generate is done to its copies as well, each with its own weights."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from students import COMPRESSED
from transformers import AutoModelForCausalLM, CompileConfig, LlamaForCausalLM, pipeline

import dofla

ANSWER = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def compiled(student):
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return dofla.compile_generate(student, config)


def all_of_them(student):
    dofla.keep_sessions(student)
    dofla.continuous_batching(student)


HOW = {"sessions": dofla.keep_sessions, "batching": dofla.continuous_batching, "both": all_of_them}
ALL_WAYS = [*HOW, pytest.param("compiled", marks=pytest.mark.slow)]
HOW["compiled"] = compiled


def through_a_file(student):
    file = io.BytesIO()
    torch.save(student, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda student: pickle.loads(pickle.dumps(student)),
    "file": through_a_file,
}


def student_of(tiny):
    model = tiny.llama().double()
    return dofla.linearize(model, tiny.plan(model, **COMPRESSED))


@pytest.mark.slow
@pytest.mark.parametrize("made", COPIES)
@pytest.mark.parametrize("how", ALL_WAYS)
def test_a_copy_answers_with_its_own_weights(tiny, how, made):
    student, plain, ids = student_of(tiny), student_of(tiny), tiny.tokens(1, 20)
    HOW[how](student)
    first = student.generate(ids, **ANSWER)
    copied = COPIES[made](student)
    assert torch.equal(copied.generate(ids, **ANSWER), first)
    with torch.no_grad():
        for model in (copied, plain):
            model.lm_head.weight.neg_()
            model.model.layers[0].mlp.up_proj.weight.neg_()
            assert torch.equal(copied(ids).logits, plain(ids).logits) == (model is plain)
    assert torch.equal(copied.generate(ids, **ANSWER), plain.generate(ids, **ANSWER))
    assert torch.equal(student.generate(ids, **ANSWER), first)


def test_sessions_of_a_copy_are_its_own(tiny):
    student, ids = student_of(tiny), tiny.tokens(1, 20)
    sessions = dofla.keep_sessions(student, most=3)
    student.generate(ids, **ANSWER)
    copied = copy.deepcopy(student)
    copied.generate(ids[:, :9], **ANSWER)
    assert (len(sessions), sessions.read) == (2, 19)
    assert (len(copied._dofla_sessions), copied._dofla_sessions.read) == (2, 8)


@pytest.mark.parametrize("how", ALL_WAYS)
def test_the_model_is_what_it_was_to_others(tiny, tmp_path, tokenizer, how):
    model = tiny.llama(vocab_size=2048)
    student = dofla.linearize(model, tiny.plan(model, **COMPRESSED))
    forward = inspect.signature(student.forward)
    HOW[how](student)
    assert type(student).__name__ == type(student).__qualname__ == "LlamaForCausalLM"
    assert isinstance(student, LlamaForCausalLM)
    assert inspect.signature(student.forward) == forward
    assert not {"generate", "forward"} & vars(student).keys()
    student.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    ids = tiny.tokens(1, 20)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is LlamaForCausalLM
    assert torch.equal(opened.generate(ids, **ANSWER), student.generate(ids, **ANSWER))
    writes = pipeline("text-generation", model=student, tokenizer=tokenizer)
    assert writes("Once upon a time", **ANSWER)[0]["generated_text"].startswith("Once upon a time")


@pytest.mark.parametrize("how", ALL_WAYS)
def test_peft_wraps_it_before_and_after(tiny, how):
    plain, ids = student_of(tiny), tiny.tokens(1, 20)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wanted = get_peft_model(plain, config).generate(input_ids=ids, **ANSWER)
    before, after = student_of(tiny), student_of(tiny)
    HOW[how](after)
    torch.manual_seed(0)
    after = get_peft_model(after, config)
    torch.manual_seed(0)
    before = get_peft_model(before, config)
    HOW[how](before)
    for wrapped in (before, after, copy.deepcopy(after)):
        assert torch.equal(wrapped.generate(input_ids=ids, **ANSWER), wanted)


def test_the_order_in_which_they_are_asked_for_is_no_matter(tiny):
    plain, ids = student_of(tiny), tiny.tokens(1, 20)
    for order in ([dofla.keep_sessions, dofla.continuous_batching], [dofla.continuous_batching, dofla.keep_sessions]):
        student = student_of(tiny)
        for each in order * 2:
            each(student)
        text = ids
        for turn in range(2):
            text = student.generate(text, **ANSWER)
            assert student._dofla_sessions.read == (0 if turn else 19)
        assert torch.equal(text, plain.generate(plain.generate(ids, **ANSWER), **ANSWER))


@pytest.mark.parametrize("how", ALL_WAYS)
def test_restoring_gives_the_class_back(tiny, how):
    student = student_of(tiny)
    HOW[how](student)
    student.generate(tiny.tokens(1, 20), **ANSWER)
    model = dofla.restore(student)
    assert type(model) is LlamaForCausalLM
    assert not [name for name in vars(model) if name.startswith("_dofla")]
    assert torch.equal(
        model.generate(tiny.tokens(1, 9), **ANSWER), tiny.llama().double().generate(tiny.tokens(1, 9), **ANSWER)
    )


@pytest.mark.parametrize("how", ALL_WAYS[:3])
def test_a_deleted_student_leaves_memory_at_once(tiny, how):
    student = student_of(tiny)
    HOW[how](student)
    student.generate(tiny.tokens(1, 20), **ANSWER)
    gone = weakref.ref(student)
    gc.collect()
    gc.disable()
    try:
        del student
        assert gone() is None
    finally:
        gc.enable()
