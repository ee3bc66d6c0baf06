"""``dofla.check`` and ``dofla check``: what becomes of a model, told by its config alone."""

import json

import pytest
import torch
from command_line import call
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig

import dofla
from dofla.compression.directions import LENGTH, WINDOWS
from dofla.compression.retrieval import FAR
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.plans.plan import LENGTHS
from dofla.runs.calibration import calibration_operations
from dofla.runs.check import Check
from dofla.runs.demo import model_path

NAME = "model.layers.{}.self_attn"
GEMMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "max_position_embeddings": 40_000}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}


def told(found: Check) -> dict:
    """All but what is timed, and depends on what else runs."""
    return {name: value for name, value in found.to_dict().items() if name not in ("seconds", "available")}


def test_a_model_its_config_and_its_folder_tell_the_same(tiny, tmp_path):
    model = tiny.llama()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    sizes = ["4KB", "10KiB"]
    found = dofla.check(model, sizes)
    assert told(found) == told(dofla.check(model.config, sizes)) == told(dofla.check(tmp_path, sizes))
    assert found.supported
    assert found.reason is None
    assert [(x.name, x.kv_heads, x.head_dim, x.becomes) for x in found.layers] == [
        (NAME.format(n), 2, 8, "compressed") for n in range(2)
    ]
    assert 0 < found.seconds < 60


def test_bytes_are_those_of_the_caches(tiny):
    model = tiny.llama()
    sizes = [4_000, 10_240]
    found = dofla.check(model, sizes)
    assert [(x.tokens, x.size) for x in found.cache] == [(n, size) for size in sizes for n in LENGTHS]
    for size in sizes:
        student = dofla.compress(model, tiny.tokens(2, 32), size, head_budgets="even")
        plan = Converted.of(student).plan
        for x in found.cache:
            if x.size == size:
                assert x.compressed == plan.state_bytes(torch.bfloat16)
                assert x.softmax == plan.softmax_bytes(x.tokens, torch.bfloat16) == x.tokens * 2 * 32 * 2
                assert x.factor == x.softmax / x.compressed
        dofla.restore(model)


def test_a_bounded_layer_stays_and_its_cache_counts_in_both():
    found = dofla.check(Gemma3TextConfig(**GEMMA), ["5KB"])
    assert [x.becomes for x in found.layers] == ["already bounded", "compressed"]
    assert found.layers[0].reason == "it attends to a window of 16 tokens"
    for x in found.cache:
        assert x.softmax == (16 + x.tokens) * 2 * 16 * 2
        assert 0 < x.compressed - 16 * 2 * 16 * 2 < x.softmax


def test_layers_kept_softmax_and_refused_ones_count_whole(tiny):
    kept = dofla.check(tiny.llama(), keep_softmax=[NAME.format(0)])
    assert kept.supported
    assert [x.becomes for x in kept.layers] == ["stays softmax", "compressed"]
    both = dofla.check(tiny.llama())
    for one, other in zip(kept.cache, both.cache, strict=True):
        assert one.compressed == one.softmax // 2 + other.compressed // 2

    crossing = dofla.check(tiny.gpt2(add_cross_attention=True))
    assert not crossing.supported
    assert "layer transformer.h.0.crossattention cannot be converted: it is cross-attention" in crossing.reason
    assert [x.becomes for x in crossing.layers] == ["compressed", "refused"] * 2
    assert crossing.cache
    assert "refused layers kept softmax" in str(crossing)


@pytest.mark.parametrize("kind", ["bert", "gemma2", "capped_kept"])
def test_what_is_refused_is_refused_in_the_words_of_compress(kind, tiny):
    options = {"keep_softmax": [NAME.format(1)]} if kind == "capped_kept" else {}
    model = tiny.bert() if kind == "bert" else AutoModelForCausalLM.from_config(Gemma2Config(**GEMMA))
    found = dofla.check(model, **options)
    with pytest.raises(DoflaError) as refusal:
        dofla.compress(model, tiny.tokens(2, 32), head_budgets="even", **options)
    assert not found.supported
    assert found.reason == str(refusal.value)
    assert not found.cache
    assert found.seconds is None


def test_what_cannot_be_reached_is_said_with_the_reason():
    found = dofla.check(AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=4))
    assert not found.supported
    assert found.layers == []
    assert "has no attention that goes through transformers' attention interface" in found.reason


def test_the_text_fits_a_terminal(tiny):
    for found in (dofla.check(tiny.llama(), [24, 64]), dofla.check(Gemma2Config(**GEMMA)), dofla.check(tiny.bert())):
        assert all(len(line) <= 80 for line in str(found).splitlines())
    assert "supported" in str(found)


@pytest.mark.slow
def test_a_model_too_large_for_any_memory_is_told_of():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=131_072)
    found = dofla.check(config)
    assert found.parameters == 70_553_706_496
    assert len(found.layers) == 80
    assert found.cache[-1].softmax == LENGTHS[-1] * 80 * 8 * 256 * 2
    assert found.seconds > 600


def test_a_model_is_told_of_for_people_and_for_programs(capsys):
    assert call("check", "demo", "--size", "102KiB", "--size", "272KiB") == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, 3.54 M parameters: supported" in shown
    assert "on this machine (estimates)" in shown
    assert call("check", "demo", "--size", "272KiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["supported"]
    assert [(x["tokens"], x["size"]) for x in found["cache"]] == [(n, 278_528) for n in LENGTHS]
    assert found["cache"][0]["factor"] > 10


def test_what_is_not_supported_exits_with_1(tiny, tmp_path, capsys):
    tiny.bert().config.save_pretrained(tmp_path)
    assert call("check", tmp_path) == 1
    assert "not supported" in capsys.readouterr().out
    assert call("check", tmp_path, "--json") == 1
    assert json.loads(capsys.readouterr().out)["supported"] is False


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "has no config.json: give that of a model"),
        ({"config.json": "{"}, "not a valid JSON file"),
        ({"config.json": '{"model_type": "nothing"}'}, "model type `nothing`"),
        ({"config.json": '{"model_type": "llama", "hidden_size": "x"}'}, "field 'hidden_size': TypeError"),
        (
            {"config.json": '{"model_type": "llama", "quantization_config": {"quant_method": "dofla"}}'},
            "is compressed or linearized already: give its base model",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(files, match, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DoflaError, match=match):
        dofla.check(tmp_path)


def test_wrong_names_and_options_are_refused(tiny):
    for name, match in (("/no/such/folder", "no folder"), ("no/model", "cannot read the config")):
        with pytest.raises(DoflaError, match=match):
            dofla.check(name)
    for options, match in [
        ({"sizes": ["5 m"]}, "size is '5 m': give bytes with a unit"),
        ({"sizes": ["5KB"], "ratio": 16}, "sizes are given and ratio is 16: give one of them"),
        ({"keep_softmax": ["x"]}, "keep_softmax names 'x'"),
    ]:
        with pytest.raises(DoflaError, match=match):
            dofla.check(tiny.llama(), **options)
    student = dofla.compress(tiny.llama(), tiny.tokens(2, 32), head_budgets="even")
    with pytest.raises(DoflaError, match="converted already"):
        dofla.check(student)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()

class Config(LlamaConfig):
    model_type = "mine"

class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_code_of_a_checkpoint_runs_only_if_allowed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    config = tiny.llama().config.to_dict() | {"model_type": "mine", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(CODE.format(marker=str(ran)))
    with pytest.raises(DoflaError, match=r"brings code of its own: .* by --set trust_remote_code=true\)"):
        dofla.check(folder)
    assert not ran.exists()
    found = dofla.check(folder, trust_remote_code=True)
    assert ran.exists()
    assert found.supported
    assert len(found.layers) == 2


@pytest.mark.slow
def test_the_estimate_counts_the_passes_of_calibration(tiny):
    model, read = AutoModelForCausalLM.from_pretrained(model_path()), []
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: read.append(out.shape[:-1].numel()))
    dofla.calibrate(model, tiny.tokens(WINDOWS, LENGTH))
    needles = min(FAR, model.config.max_position_embeddings)
    assert sum(read) == pytest.approx(calibration_operations(1) - FAR + needles, rel=0.05)


def test_every_size_that_is_asked_for_is_judged(tiny):
    found = dofla.check(tiny.llama(), ["9KB", "1B"])
    assert not found.supported
    assert found.reason.startswith("size 1 bytes is too small")
