"""Models opened by accelerate's offload: whatever runs them forward works as if they were in memory."""

import dataclasses

import pytest
import torch
import typer
from accelerate import cpu_offload, disk_offload
from safetensors.torch import load_file, save_file
from students import without_checksums
from tiny_families import student, teacher, tokens
from transformers.integrations import accelerate as placement

import dofla
from dofla.cli import app
from dofla.cli.settings import Settings
from dofla.errors import DoflaError
from dofla.integration.checkpoint import feature_map_tensors, load_any
from dofla.integration.offload import is_offloaded
from dofla.runs.opening import open_converted, open_original
from dofla.storage.tensors import read_tensors

WINDOWS = tokens(4, 64)
OFFLOAD = {"device_map": dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")}
OFFLOAD["device_map"] |= {"model.layers.0": "cpu", "model.layers.1": "disk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and of it a compressed and a linearized one, both as a whole and as an adapter."""
    folder = tmp_path_factory.mktemp("offload")
    teacher("llama").save_pretrained(folder / "model")
    model = load_any(folder / "model")
    compress(model).save_pretrained(folder / "compressed")
    dofla.save_adapter(model, folder / "compressed-adapter")
    dofla.linear.linearize(dofla.restore(model), budget=8).to(torch.bfloat16).save_pretrained(folder / "linearized")
    dofla.save_adapter(model, folder / "linearized-adapter")
    return folder


def compress(model):
    return dofla.compress(model, WINDOWS, "8KiB", head_budgets="even", progress=False)


def offloaded(path, **options):
    model = load_any(path, **OFFLOAD, **options)
    for name, weight in model.named_parameters():
        assert weight.is_meta == ("layers.1" in name and ".dofla." not in name)
    return model


@torch.no_grad()
@pytest.mark.parametrize("buffers", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["compressed", "compressed-adapter", "linearized", "linearized-adapter"])
def test_it_answers_generates_and_is_evaluated_alike(folder, name, buffers):
    whole, other = load_any(folder / name), offloaded(folder / name, offload_buffers=buffers)
    maps, ids = feature_map_tensors(whole), tokens(2, 40)
    assert all(torch.equal(value, maps[key]) for key, value in feature_map_tensors(other).items())
    assert torch.equal(whole(ids).logits, other(ids).logits)
    written = [model.generate(ids, max_new_tokens=8, do_sample=False) for model in (whole, other)]
    assert torch.equal(*written)
    assert dofla.evaluate(whole, WINDOWS) == dofla.evaluate(other, WINDOWS)
    assert is_offloaded(other)


def test_it_is_profiled_alike(folder):
    profiles = [dofla.linear.profile(open_(folder / "model"), WINDOWS, samples=16) for open_ in (load_any, offloaded)]
    assert profiles[0].to_dict() == profiles[1].to_dict()


def test_it_is_compressed_and_saved_alike(folder, tmp_path):
    compress(offloaded(folder / "model")).save_pretrained(tmp_path)
    found, wanted = (load_file(place / "model.safetensors") for place in (tmp_path, folder / "compressed"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


ON_CPU = {"execution_device": torch.device("cpu")}
PLACES = {
    "on disk": lambda path, disk: load_any(path, device_map={"": "disk"}, offload_folder=disk),
    "on disk afterwards": lambda path, disk: disk_offload(load_any(path), disk, **ON_CPU),
    "in host memory": lambda path, _: cpu_offload(load_any(path), **ON_CPU),
}


def placed(place, path, disk):
    try:
        return PLACES[place](path, disk)
    except DoflaError as error:
        if "Please use the `disk_offload` function" not in str(error):
            raise
        pytest.skip("this version of accelerate opens no model of which all is on disk")


@pytest.mark.parametrize("place", ["on disk in part", *PLACES])
def test_it_is_calibrated_alike(folder, tmp_path, place):
    model = placed(place, folder / "model", tmp_path) if place in PLACES else offloaded(folder / "model")
    for name, own in {"whole": load_any(folder / "model"), "offloaded": model}.items():
        found = dofla.calibrate(own, tokens(6, 64), progress=False)  # one is held out
        dataclasses.replace(found, weights=()).save(tmp_path / name)  # of weights those in memory are sampled
    (found, said), (wanted, expected) = (read_tensors(tmp_path / name) for name in ("offloaded", "whole"))
    assert said == expected
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@torch.no_grad()
@pytest.mark.parametrize("place", PLACES)
def test_a_model_of_which_nothing_is_in_memory_is_compressed_and_answers_alike(folder, tmp_path, place):
    model, whole = compress(placed(place, folder / "model", tmp_path)), load_any(folder / "compressed")
    ids = tokens(2, 40)
    assert all(weight.is_meta for name, weight in model.named_parameters() if ".dofla." not in name)
    right, found = feature_map_tensors(whole), feature_map_tensors(model)
    assert all(torch.equal(found[name], value) for name, value in right.items())
    assert torch.equal(model(ids).logits, whole(ids).logits)
    assert torch.equal(*(x.generate(ids, max_new_tokens=8, do_sample=False) for x in (model, whole)))
    assert dofla.evaluate(model, WINDOWS).loss == dofla.evaluate(whole, WINDOWS).loss
    with dofla.original(model):
        assert torch.equal(model(ids).logits, load_any(folder / "model")(ids).logits)
    dofla.save_adapter(model, tmp_path / "adapter")


def test_what_changes_weights_is_refused(folder, tmp_path):
    linearized = offloaded(folder / "linearized-adapter")
    for train in (dofla.linear.distill, dofla.linear.distill_end_to_end):
        with pytest.raises(DoflaError, match=r"^training needs all weights in memory: open the model without offload"):
            train(linearized, WINDOWS)
    trained = load_any(folder / "linearized-adapter")
    dofla.linear.distill_end_to_end(trained, WINDOWS, steps=1, progress=False)
    dofla.save_adapter(trained, tmp_path / "adapter")
    with pytest.raises(DoflaError, match=r"^adding trained weights needs all weights in memory"):
        offloaded(tmp_path / "adapter")


def test_a_feature_map_that_is_missing_on_disk_is_named(tmp_path):
    student("llama", "ragged").save_pretrained(tmp_path)
    without_checksums(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.dofla.groups.0.map.z"
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(DoflaError, match=rf"does not fit its plan: {name} is missing"):
        offloaded(tmp_path)


def test_accelerate_decides_what_stays_in_memory(folder, tmp_path, monkeypatch):
    half = dofla.demo()[0].get_memory_footprint() // 2
    monkeypatch.setattr(placement, "get_max_memory", lambda *_: {"cpu": half})
    model, _ = open_converted("demo", offload=tmp_path)
    assert is_offloaded(model)
    with pytest.raises(DoflaError, match="device is 'cpu': with offload accelerate places the layers"):
        open_original("demo", device="cpu", offload=tmp_path)


def test_every_verb_that_only_runs_a_model_takes_offload():
    commands = typer.main.get_command(app).commands
    fields = {name: getattr(command.callback, "fields", None) for name, command in commands.items()}
    taking = {name for name, own in fields.items() if isinstance(own, Settings) and "offload" in own.fields}
    assert taking == {"calibrate", "compress", "evaluate", "generate", "chat", "serve", "profile"}
