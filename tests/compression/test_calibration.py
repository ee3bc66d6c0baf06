"""Calibration: measured once, saved as one file, and good for every size of the cache of its model."""

import dataclasses
import json
import logging
import os
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import save_file

import dofla
from dofla.compression.calibration import Calibration, _parts
from dofla.compression.known import cache_folder
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.storage import tensors as storage

FIRST = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def windows(tiny):
    return dofla.TokenWindows.of(tiny.tokens(6, 96))


@pytest.fixture(scope="module")
def calibration(tiny, windows):
    return dofla.calibrate(tiny.llama(), windows)


def same(one: Calibration, other: Calibration) -> bool:
    plain = [
        dataclasses.asdict(x)
        | {"directions": None, "importance": None, "retrieval": [*x.retrieval], "attention": [*x.attention]}
        for x in (one, other)
    ]
    tensors = [
        dict(part for own in x.directions.values() for part in _parts(own)) | dict(x.importance) for x in (one, other)
    ]
    return plain[0] == plain[1] and all(torch.equal(x, tensors[1][name]) for name, x in tensors[0].items())


def test_it_is_frozen_and_leaves_the_model_as_it_was(tiny, windows, calibration):
    model, ids = tiny.llama(), tiny.tokens(1, 30)
    before = model(ids).logits
    assert same(dofla.calibrate(model, windows), calibration)
    assert torch.equal(model(ids).logits, before)
    assert not hasattr(model, "_dofla_softmax_implementation")
    assert calibration.made_by["tokens"] == 6 * 96
    with pytest.raises(dataclasses.FrozenInstanceError):
        calibration.model = "another"


@pytest.mark.parametrize("options", [{}, {"head_budgets": "even"}], ids=str)
@pytest.mark.parametrize("size", ["3KB", "8KB"])
def test_calibrate_then_compress_is_compress(tiny, windows, options, size):
    ids = tiny.tokens(2, 90)
    at_once = dofla.compress(tiny.llama(), windows, size, **options)
    one = dofla.calibrate(tiny.llama(), windows, **options)
    model = dofla.compress(tiny.llama(), size=size, calibration=one)
    assert Converted.of(model).plan == Converted.of(at_once).plan
    assert torch.equal(model(ids).logits, at_once(ids).logits)


def test_one_calibration_serves_every_size(tiny, calibration, tmp_path):
    calibration.save(tmp_path / "calibration.safetensors")
    model, ids, found = tiny.llama(), tiny.tokens(2, 200), []
    with dofla.original(dofla.compress(model, size="4KB", calibration=calibration)):
        wanted = model(ids, use_cache=False).logits.log_softmax(-1)
    dofla.restore(model)
    for size in (1_000, 2_000, 4_000, 16_000):
        dofla.compress(model, size=size, calibration=tmp_path / "calibration.safetensors")
        plan = Converted.of(model).plan
        assert 0.9 * size < plan.state_bytes(model.dtype) <= size
        assert plan.made_by["head_budgets"].keys() == calibration.shares.keys()
        own = model(ids, use_cache=False).logits.log_softmax(-1)
        found.append((wanted.exp() * (wanted - own)).sum(-1).mean().item())
        dofla.restore(model)
    assert found[0] > found[1] > found[-1]


@pytest.mark.parametrize("head_budgets", ["measured", "even"])
def test_it_comes_back_from_its_file(tiny, windows, tokenizer, tmp_path, head_budgets):
    model, path = tiny.llama(vocab_size=2048), tmp_path / "calibration.safetensors"
    for written in (dofla.calibrate(model, windows, head_budgets=head_budgets, tokenizer=t) for t in (None, tokenizer)):
        written.save(path)
        assert same(Calibration.load(path), written)
        assert str(Calibration.load(path)) == str(written)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["calibration"])["model"] == "LlamaForCausalLM"


def test_another_model_is_refused_and_other_weights_are_told(tiny, calibration, caplog):
    others = {
        "is not in it": tiny.gpt2(),
        "has other heads there": tiny.llama(num_key_value_heads=4),
        r"\(LlamaForCausalLM\): layer model.layers.2.self_attn is not in it": tiny.llama(num_hidden_layers=3),
    }
    for words, model in others.items():
        with pytest.raises(DoflaError, match=f"the calibration is of another model .*{words}.*; calibrate this one"):
            dofla.compress(model, size="8KB", calibration=calibration)
        assert not hasattr(model, "_dofla_softmax_implementation")
    with caplog.at_level(logging.WARNING):
        dofla.compress(tiny.llama(), size="4KB", calibration=calibration)
        assert "other weights" not in caplog.text
        dofla.compress(tiny.llama().bfloat16(), size="4KB", calibration=calibration)
        assert "other weights" not in caplog.text  # the same in another dtype
        dofla.compress(tiny.llama(seed=1), size="4KB", calibration=calibration)
        assert "the calibration was made with other weights of LlamaForCausalLM" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, metadata: tensors.pop(f"{FIRST}:keys.root"),
        lambda tensors, metadata: tensors[f"{FIRST}:keys.root"].fill_(torch.nan),
        lambda tensors, metadata: metadata.update(format="0"),
        lambda tensors, metadata: metadata.update(calibration="{"),
        lambda tensors, metadata: metadata.update(calibration=metadata["calibration"].replace("{", '{"color": 1, ', 1)),
    ],
    ids=["a tensor missing", "no number", "another format", "no JSON", "an unknown field"],
)
def test_a_damaged_file_is_one_line_that_names_it(calibration, tmp_path, damage):
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    damage(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(DoflaError, match=r"calibration\.safetensors .*calibrate again") as error:
        Calibration.load(path)
    assert "\n" not in str(error.value)


def test_what_is_no_calibration_is_refused(tmp_path):
    with pytest.raises(DoflaError, match=r"missing\.safetensors"):
        Calibration.load(tmp_path / "missing.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(DoflaError, match="is no calibration of this version of dofla: calibrate again"):
        Calibration.load(tmp_path / "weights.safetensors")


@pytest.fixture
def interrupted(monkeypatch, tmp_path):
    """A calibration that is interrupted once a share is read, and the folder of this user."""
    monkeypatch.setattr(constants, "HF_HOME", tmp_path)

    def calibrate(share, *given, **options):
        def stop(stage, done, total):
            if done > share * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            dofla.calibrate(*given, **options, progress=stop)
        return cache_folder()

    return calibrate


@pytest.mark.parametrize("share", [0.7, 0.97])
def test_an_interrupted_one_goes_on(tiny, tokenizer, interrupted, share, caplog):
    model, windows, read, told = tiny.llama(vocab_size=2048), dofla.TokenWindows.of(tiny.tokens(14, 192)), [], []
    options = {"tokenizer": tokenizer, "batch_size": 2}
    before = model(windows.input_ids[:1]).logits
    folder = interrupted(share, model, windows, **options)
    (kept,) = folder.rglob("*.safetensors")
    assert kept.parents[1].suffix == ".unfinished"
    assert torch.equal(model(windows.input_ids[:1]).logits, before)
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: read.append(out.shape[:-1].numel()))
    found = dofla.calibrate(model, windows, **options, progress=lambda *x: told.append(x[1:]))
    assert "an interrupted calibration goes on" in caplog.text
    assert not any(folder.iterdir())
    less = sum(read)
    assert same(found, dofla.calibrate(model, windows, **options))
    total = sum(read) - less
    assert less < (1.4 - share) * total
    assert told[-1][0] == told[-1][1] == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("change", ["windows", "options", "weights", "damage"])
def test_another_one_begins_anew(tiny, windows, interrupted, change, caplog):
    folder = interrupted(0.7, tiny.llama(), windows)
    windows = dofla.TokenWindows.of(tiny.tokens(6, 96, seed=5)) if change == "windows" else windows
    options = {"context": 128} if change == "options" else {}
    model = tiny.llama(seed=int(change == "weights"))
    if change == "damage":
        next(folder.rglob("*.safetensors")).write_bytes(b"half")
    found = dofla.calibrate(model, windows, **options)
    assert "goes on" not in caplog.text
    assert len([*folder.rglob("*.safetensors")]) == (change != "damage")
    assert same(found, dofla.calibrate(model, windows, **options))


def test_two_of_one_model_at_once_leave_each_other_alone(tiny, windows, interrupted, monkeypatch):
    """One ends, and removes what both had measured, while the other writes, or between two writes."""
    others = dofla.TokenWindows.of(tiny.tokens(6, 96, seed=5))
    folder = interrupted(0.7, tiny.llama(), others)
    kept, found = list(folder.rglob("*.safetensors")), []

    def also(stage, done, total):
        if done > 0.7 * total and not found:
            found.append(None)
            found[0] = dofla.calibrate(tiny.llama(), windows)

    def late(tensors, path, **options):
        shutil.rmtree(path.parents[1])
        save_file(tensors, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "save_file", late)
        assert same(dofla.calibrate(tiny.llama(), windows), dofla.calibrate(tiny.llama(), windows, progress=also))
    assert same(found[0], dofla.calibrate(tiny.llama(), windows))
    assert list(folder.rglob("*.safetensors")) == kept  # another text's
    os.utime(kept[0].parent, (0, 0))
    dofla.calibrate(tiny.llama(), windows)
    assert not any(folder.iterdir())
