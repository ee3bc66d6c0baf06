"""Compressed models on disk, and what transformers' generate writes with them; run in an environment with vLLM
(``nox -s vllm``), whose transformers is another than that of the other tests."""

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import dofla
from dofla.runs.opening import open_original

if find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


def saved(folder, **options):
    """The bundled model, compressed, and its folder."""
    model, tokenizer, _ = dofla.demo()
    return compressed_in(folder, model.float(), tokenizer, **options)


def compressed_in(folder, model, tokenizer, **options):
    """A model, compressed if there are options, and its folder. How its prompts are cut into pieces changes nothing,
    unless the options have another prefill."""
    windows = dofla.token_windows("sample", tokenizer, windows=12)
    if options:
        found = dofla.calibrate(model, windows, progress=False, head_budgets="even")
        if options.pop("uneven", False):
            shares = {
                name: [1.2 if n else 0.4] * own.shape[0] for n, (name, own) in enumerate(found.directions.items())
            }
            found = replace(found, shares=shares)
        dofla.compress(model, calibration=found, **{"prefill": "sequential"} | options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, folder


# All models are made before the first engine, which changes what transformers does in its process.


@pytest.fixture(scope="session", autouse=True)
def compressed(tmp_path_factory):
    """Head budgets differ, so that states of layers do, and some heads hold every token."""
    options = {"size": "128KiB", "context": 512, "retrieval_heads": 3}
    return saved(tmp_path_factory.mktemp("compressed"), uneven=True, **options)


@pytest.fixture(scope="session", autouse=True)
def important(tmp_path_factory):
    """Of prompts it retains what is predicted to be important, as by default; one head holds every token."""
    options = {"size": "128KiB", "context": 512, "retrieval_heads": 1, "prefill": "exact"}
    return saved(tmp_path_factory.mktemp("important"), **options)


@pytest.fixture(scope="session", autouse=True)
def mixed(tmp_path_factory):
    """One layer stays softmax."""
    options = {"ratio": 8, "head_budgets": "even", "keep_softmax": ["model.layers.1.self_attn"]}
    return saved(tmp_path_factory.mktemp("mixed"), **options)


@pytest.fixture(scope="session", autouse=True)
def sliding(tmp_path_factory):
    """Every other layer has a sliding window: the weights of the bundled model, in a family that has such layers."""
    teacher, tokenizer, _ = dofla.demo()
    known = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    known += ("num_hidden_layers", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "max_position_embeddings")
    known += ("bos_token_id", "eos_token_id")
    kinds = ["sliding_attention", "full_attention"] * teacher.config.num_hidden_layers
    same = {name: getattr(teacher.config, name) for name in known}
    own = {"layer_types": kinds[: teacher.config.num_hidden_layers], "sliding_window": 48, "use_sliding_window": True}
    model = Qwen2ForCausalLM(Qwen2Config(**same, **own)).float().eval()
    lacking, others = model.load_state_dict(teacher.state_dict(), strict=False)
    assert not others
    for name in lacking:  # biases of queries, keys and values
        model.get_parameter(name).data.zero_()
    return compressed_in(tmp_path_factory.mktemp("sliding"), model, tokenizer, ratio=4, head_budgets="even")


@pytest.fixture(scope="session", autouse=True)
def features(tmp_path_factory):
    """Feature maps, which are not served; its folder."""
    folder = tmp_path_factory.mktemp("features")
    model, tokenizer, _ = dofla.demo()
    dofla.linear.linearize(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def plain(tmp_path_factory):
    """The model as it came."""
    return saved(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session", autouse=True)
def prompts():
    """Sixteen prompts of 1 to 700 tokens. They are stories: after random tokens the likeliest are close to one another,
    and sums in another order choose others."""
    _, tokenizer, _ = dofla.demo()
    windows = dofla.token_windows("sample", tokenizer, windows=16, length=700)
    lengths = [1, 2, 5, 17, 31, 32, 33, 64, 65, 100, 150, 200, 300, 400, 511, 700]
    return [row[:length].tolist() for row, length in zip(windows.input_ids, lengths, strict=True)]


@pytest.fixture(scope="session", autouse=True)
def check(compressed, prompts):
    """The function that checks what was written after the prompt of a number."""
    return check_of(compressed[0], prompts)


@pytest.fixture(scope="session", autouse=True)
def check_important(important, prompts):
    """:func:`check` of the model that retains what is important."""
    return check_of(important[0], prompts)


@pytest.fixture(scope="session", autouse=True)
def check_mixed(mixed, prompts):
    """:func:`check` of the model whose one layer stays softmax."""
    return check_of(mixed[0], prompts)


@pytest.fixture(scope="session", autouse=True)
def check_sliding(sliding, prompts):
    """:func:`check` of the model with sliding layers."""
    return check_of(sliding[0], prompts)


@pytest.fixture(scope="session", autouse=True)
def int8(tmp_path_factory, prompts):
    """The folder of a model with the weights of its linear layers in int8, and :func:`check` of it."""
    if find_spec("torchao") is None:
        return None
    _, base = saved(tmp_path_factory.mktemp("base"))
    model, tokenizer = open_original(str(base), dtype="int8")
    _, folder = compressed_in(tmp_path_factory.mktemp("int8"), model, tokenizer, ratio=4, head_budgets="even")
    return folder, check_of(model, prompts)


def check_of(model, prompts):
    """The function that checks what was written after the prompt of a number: it is what generate writes, up to a token
    whose next best is as good. (Sums are in another order, and codes at a border of two round the other way.)"""
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted, leads = [], []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), **options)
        with torch.inference_mode():
            best = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1).topk(2).values
        wanted.append(tokens[0, len(prompt) :].tolist())
        leads.append((best[:, 0] - best[:, 1]).tolist())

    def checked(n, tokens):
        assert len(tokens) == 12
        differs = next((at for at in range(12) if tokens[at] != wanted[n][at]), None)
        assert differs is None or leads[n][differs] < 0.02, f"token {differs} of {tokens} is not that of {wanted[n]}"

    assert sum(lead < 0.02 for own in leads for lead in own) < 12 * len(prompts) / 10
    return checked
