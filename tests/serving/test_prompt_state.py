"""A prompt's state saved and gone on from is the same as reading the prompt again."""

import pytest
import torch
from safetensors import safe_open
from students import keep_softmax, student_of

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.serving import load_state, read_prompt, save_state
from dofla.storage.tensors import read_tensors, write_tensors

SIZES = {
    "alike": {"features": [3, 5], "window": 3, "sinks": 2},
    "ragged": {"features": 4, "window": [3, 0], "sinks": [0, 2]},
    "eight bits": {"features": [3, 5], "window": [3, 6], "sinks": 2, "token_dtype": "int8"},
}


@pytest.fixture(params=[*SIZES, "compressed"])
def student(tiny, request):
    # Two ways to the same number may end on two sides of a step of eight bits or of a code, but hardly in float64.
    model = tiny.llama().double()
    if request.param == "compressed":
        return tiny.compressed(model)
    return dofla.linear.linearize(model, tiny.plan(model, **SIZES[request.param]))


def test_questions_about_a_saved_document_are_answered_as_with_the_document_before_them(student, tmp_path):
    generator = torch.Generator().manual_seed(0)
    vocabulary = student.config.vocab_size
    document = torch.randint(1, vocabulary, (1, 90), generator=generator)
    path = tmp_path / "document.safetensors"
    save_state(read_prompt(student, document, chunk=16), document, path, student)
    for _ in range(3):
        question = torch.randint(1, vocabulary, (1, 7), generator=generator)
        prompt, cache = load_state(path, student)
        whole = torch.cat([prompt, question], dim=1)
        options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(whole)}
        size = cache_bytes(cache)
        answer = student.generate(whole, past_key_values=cache, **options)
        assert torch.equal(answer, student.generate(whole, **options))
        assert cache_bytes(cache) == size


@pytest.mark.parametrize("token_dtype", ["int8", "model"])
def test_a_saved_state_holds_tokens_as_the_cache_does(tiny, tmp_path, token_dtype):
    document = tiny.tokens(2, 30)
    model = student_of(tiny, features=3, window=[20, 4], sinks=[1, 0], token_dtype=token_dtype)
    cache = read_prompt(model, document)
    save_state(cache, document, tmp_path / "state", model)
    kept_in = torch.int8 if token_dtype == "int8" else torch.float32
    with safe_open(tmp_path / "state", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    assert torch.equal(tensors.pop("input_ids"), document)
    for name, tensor in tensors.items():
        if name.split(".")[2] in ("window", "sinks") and "log_weight" not in name:
            assert tensor.dtype == kept_in
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == cache_bytes(cache)
    _, opened = load_state(tmp_path / "state", model)
    with torch.no_grad():
        step = tiny.tokens(2, 1, seed=5)
        found, expected = (model(step, past_key_values=each).logits for each in (opened, cache))
    assert torch.equal(found, expected)


def test_a_state_of_another_form_or_a_damaged_one_is_refused_by_name(tiny, tmp_path, monkeypatch):
    document, path = tiny.tokens(1, 10), tmp_path / "document.safetensors"
    model = student_of(tiny, features=3, window=4, token_dtype="int8")
    cache = read_prompt(model, document)
    save_state(cache, document, path, model)
    for sizes in ({"features": 4}, {"features": 3, "window": 4, "token_dtype": "model"}):
        other = student_of(tiny, **sizes)
        with pytest.raises(
            DoflaError, match=r"document\.safetensors is no state of this version and of a model of this"
        ):
            load_state(path, other)
    with monkeypatch.context() as earlier:
        earlier.setattr("dofla.layers.state_file._FORMAT", "8")
        with pytest.raises(DoflaError, match=r"document\.safetensors is no state of this version"):
            load_state(path, model)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DoflaError, match=r"document\.safetensors is damaged"):
        load_state(path, model)
    with pytest.raises(DoflaError, match="does not exist"):
        load_state(tmp_path / "missing", model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("input_ids"), "it holds no tokens"),
        (lambda t: t.update(input_ids=t["input_ids"].float()), "it holds no tokens"),
        (lambda t: t.update(input_ids=t["input_ids"] + 10**6), "knows 0 to"),
        (lambda t: t.update(input_ids=t["input_ids"].repeat(2, 1)), "has another form"),
        (lambda t: t.pop("1.0.features.mean"), "1.0.features.mean has another form"),
        (lambda t: t.update({"1.0.features.mean": t["1.0.features.mean"].half()}), "1.0.features.mean has another"),
        (lambda t: t.update({"1.0.features.mean": t["1.0.features.mean"].mT}), "1.0.features.mean has another form"),
    ],
)
def test_a_state_whose_tensors_have_another_form_is_refused(tiny, tmp_path, change, words):
    student = student_of(tiny, features=3, window=4)
    document, path = torch.arange(1, 11).unsqueeze(0), tmp_path / "document.safetensors"
    save_state(read_prompt(student, document), document, path, student)
    tensors, metadata = read_tensors(path, finite=False)
    change(tensors)
    write_tensors(path, tensors, metadata)
    with pytest.raises(DoflaError, match=rf"document\.safetensors is damaged.*{words}"):
        load_state(path, student)


def test_a_layer_kept_softmax_cannot_be_saved(tiny, tmp_path):
    model = tiny.llama()
    plan = tiny.plan(model, features=4)
    keep_softmax(plan, 0)
    dofla.linear.linearize(model, plan)
    document = torch.arange(1, 11).unsqueeze(0)
    with pytest.raises(DoflaError, match="layer 0 is not compressed"):
        save_state(read_prompt(model, document), document, tmp_path / "state", model)


def test_reading_past_the_positions_is_warned_of_once(tiny, caplog):
    model = tiny.llama(max_position_embeddings=32)
    student = dofla.linear.linearize(model, tiny.plan(model, 4))
    cache = read_prompt(student, tiny.tokens(1, 32))
    assert not caplog.records
    for _ in range(2):
        read_prompt(student, tiny.tokens(1, 5), cache=cache)
    (record,) = caplog.records
    assert "past the 32 positions" in record.getMessage()
