"""Whole models on disk: what is given to save_pretrained is what is opened, and what was changed since is refused."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from students import without_checksums
from tiny_families import student, teacher, tokens
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

import dofla
from dofla.errors import DoflaError
from dofla.integration import checksums

OPENERS = [AutoModelForCausalLM.from_pretrained, dofla.load]
QUANTIZATION, LAYER = "quantization_config", "model.layers.1.self_attn"


def compressed(**options):
    model = teacher("llama").double()
    options |= {"head_budgets": "even", "prefill": "sequential"}  # a Trainer lets models keep no cache
    return dofla.compress(model, tokens(4, 64), "8KiB", progress=False, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A compressed llama, whole; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    compressed().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@torch.no_grad()
def logits(model):
    return model.double()(tokens(2, 40)).logits


def other_weights(model):
    return {name: weight * 0.5 if "lm_head" in name else weight for name, weight in model.state_dict().items()}


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def by_trainer(model, weights, folder):
    Trainer(model, TrainingArguments(folder, use_cpu=True, report_to=[]))._save(str(folder), state_dict=weights)


def by_accelerator(model, weights, folder):
    model.load_state_dict(weights)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder, state_dict=accelerator.get_state_dict(model), save_function=accelerator.save
    )


WAYS = {
    "keyword": lambda model, weights, folder: model.save_pretrained(folder, state_dict=weights),
    "position": lambda model, weights, folder: model.save_pretrained(folder, True, weights),
    "shards": lambda model, weights, folder: model.save_pretrained(folder, state_dict=weights, max_shard_size="20KB"),
    "trainer": by_trainer,
    "accelerator": by_accelerator,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "compressed"])
def test_the_weights_given_are_those_that_are_saved(saved, tmp_path, way, opened):
    model = AutoModelForCausalLM.from_pretrained(saved) if opened else compressed()
    right = logits(model) * 0.5
    WAYS[way](model, other_weights(model), tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), right)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(dofla.load(tmp_path)), logits(model))


def test_config_and_weights_are_taken_when_they_are_handed_in(saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    for config in (model.config, AutoConfig.from_pretrained(saved)):
        assert torch.equal(logits(LlamaForCausalLM.from_pretrained(saved, config=config)), logits(model))
        other = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=other_weights(model))
        assert torch.equal(logits(other), logits(model) * 0.5)
    config = AutoConfig.from_pretrained(saved)
    config.rms_norm_eps = 0.5
    changed = AutoModelForCausalLM.from_pretrained(saved, config=config)
    model.config.rms_norm_eps = 0.5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    assert torch.equal(logits(changed), logits(model))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 4
    path.write_bytes(content)


def with_another_tensor(path):
    tensors = load_file(path)
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]
    save_file(tensors, path, {"format": "pt"})


DAMAGE = {
    "flipped": ("model.safetensors", flip),
    "cut": ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-8])),
    "header": ("model.safetensors", lambda path: path.write_bytes(b"\0" * 8 + path.read_bytes()[8:])),
    "empty": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "edited": ("model.safetensors", with_another_tensor),
    "config": ("config.json", lambda path: edit(path.parent, lambda x: x.update(rms_norm_eps=0.5))),
    "plan": ("config.json", lambda path: edit(path.parent, lambda x: of_layer(x).update(window=3))),
    "checksums": ("config.json", lambda path: edit(path.parent, lambda x: x[QUANTIZATION].update(checksums=3))),
}


def of_layer(config):
    return config[QUANTIZATION]["layers"][LAYER]


@pytest.mark.parametrize("open_", OPENERS)
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_was_damaged_or_edited_is_refused_by_name(copied, open_, kind):
    name, damage = DAMAGE[kind]
    damage(copied / name)
    with pytest.raises(
        DoflaError, match=rf"{name} is damaged, edited or not written to its end .* remove checksums"
    ) as error:
        open_(copied)
    assert "\n" not in str(error.value)


def test_every_piece_of_a_file_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_PIECE", 16)
    (tmp_path / "file").write_bytes(bytes(100))
    found = {checksums.checksum(tmp_path / "file")}
    for place in range(100):
        (tmp_path / "file").write_bytes(bytes(place) + b"\1" + bytes(99 - place))
        found.add(checksums.checksum(tmp_path / "file"))
    assert len(found) == 101


@pytest.mark.parametrize("name", ["model-00002-of", "model.safetensors.index"])
def test_so_is_a_shard_and_the_index_of_shards(tmp_path, name):
    compressed().save_pretrained(tmp_path, max_shard_size="20KB")
    AutoModelForCausalLM.from_pretrained(tmp_path)
    path = next(path for path in tmp_path.iterdir() if path.name.startswith(name))
    path.write_bytes(path.read_bytes().replace(b"total_parameters", b"total-parameters") + b" ")
    with pytest.raises(DoflaError, match=rf"{path.name} is damaged"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_save_that_was_killed_is_not_opened(copied, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", None)  # after the config
    model = compressed()
    with pytest.raises(TypeError):
        model.save_pretrained(copied)
    with pytest.raises(DoflaError, match=r"config\.json is damaged, edited or not written to its end"):
        AutoModelForCausalLM.from_pretrained(copied)
    assert "checksums" not in model.config.to_dict()["quantization_config"]


def test_checksums_are_of_what_was_saved_last(saved, copied):
    model = AutoModelForCausalLM.from_pretrained(copied)
    model.save_pretrained(copied)
    AutoModelForCausalLM.from_pretrained(copied)
    dofla.note(copied, base_model="owner/name")
    assert dofla.load(copied).config.quantization_config.record.base_model == "owner/name"
    edit(copied, lambda config: config.update(rms_norm_eps=0.5))
    with pytest.raises(DoflaError, match=r"config\.json is damaged"):
        dofla.note(copied, base_model="owner/name")
    AutoModelForCausalLM.from_pretrained(without_checksums(copied))  # as it is to be


SIZES = {
    "kv_heads": [10**8, 4096, 8, 1],
    "head_dim": [10**9, 16384, 128, 16],
    "value_dim": [10**9, 16384, 128, 16],
    "window": [2 * 10**9, 2**24, 2**16 + 1],
    "sinks": [10**9, 2**24, 2**16 + 1],
    "newest": [10**9, 2**24, 2**16 + 1],
    "heavy_hitters": [2 * 10**9, 2**24, [2**16, 1]],
}
OF_FEATURES = {name: SIZES[name] for name in ("kv_heads", "head_dim", "window", "sinks")}
OF_FEATURES["features"] = [2**31, 2**24, 9]


@pytest.mark.parametrize("open_", OPENERS)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_the_model_cannot_have_are_refused_in_a_line(copied, open_, name):
    assert_sizes_are_refused(without_checksums(copied), open_, name, SIZES[name])


@pytest.mark.parametrize("name", OF_FEATURES)
def test_so_are_those_of_features(tmp_path, name):
    student("llama", "eight_bits").save_pretrained(tmp_path)
    assert_sizes_are_refused(without_checksums(tmp_path), OPENERS[0], name, OF_FEATURES[name])


def assert_sizes_are_refused(folder, open_, name, values):
    for value in values:
        edit(folder, lambda config, value=value: of_layer(config).update({name: value}))
        with pytest.raises(DoflaError, match=r"layers\.1\.self_attn") as error:
            open_(folder)
        assert "\n" not in str(error.value)
