"""Students under torch.compile: the whole step is one graph, and one graph does for all tokens."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from arithmetic import LOGITS
from graphs import Graphs
from sizes import compress, needs_kernels
from tiny_families import own_student, teacher, tokens
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import dofla
from dofla.attention import compiled
from dofla.errors import DoflaError
from dofla.serving import CompiledModel, Session
from dofla.serving.compiled_model import PACKED, Weights, settings


def compressed(family: str = "llama", dtype: torch.dtype = torch.float32, head_budgets: str = "even"):
    """A call of our operator per layer, or with measured head budgets one per size of a head. Graphs read tokens one
    after the other."""
    options = {"head_budgets": head_budgets, "prefill": "sequential"}
    return compress(teacher(family).to(dtype), tokens(4, 48), tokens=48, **options)


def cache_of(student, kind: str):
    return DynamicCache(config=student.config) if kind == "dynamic" else StaticCache(student.config, max_cache_len=64)


def read(call, student, kind, ids, cuts, mask=None):
    cache, found, seen = cache_of(student, kind), [], 0
    for length in cuts:
        part = slice(seen, seen + length)
        seen += length
        own = None if mask is None else mask[:, :seen]
        found.append(call(ids[:, part], attention_mask=own, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, 1), [state for layer in cache.layers for state in layer.states]


def leaves(states):
    found = []
    for state in states:
        state.map(lambda t: (found.append(t), t)[1])
    return found


def compiled_as_eager(model, kind, ids, cuts, mask=None, *, fullgraph=True):
    """The compiled model, and its graphs, once it has read to the bit what the model reads uncompiled."""
    wanted, before = read(model, model, kind, ids, cuts, mask)
    backend = Graphs()
    step = torch.compile(model, fullgraph=fullgraph, backend=backend)
    logits, states = read(step, model, kind, ids, cuts, mask)
    real = slice(None) if mask is None else mask[:, : sum(cuts)].bool()
    assert torch.equal(logits[real], wanted[real])  # the same operations in the same order
    assert all(torch.equal(a, b) for a, b in zip(leaves(states), leaves(before), strict=True))
    return step, backend.calls


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("kind", "graphs"), [("static", 2), ("dynamic", 3)])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
@torch.no_grad()
def test_a_prompt_is_a_graph_and_all_tokens_are_another(family, dtype, kind, graphs):
    # A dynamic cache counts in a number, which becomes a symbol when the second token is compiled.
    model, ids, cuts = compressed(family, dtype), tokens(2, 40), [20, *[1] * 20]
    step, calls = compiled_as_eager(model, kind, ids, cuts)
    assert calls == [["dofla.read_compressed.default"] * 2] * graphs
    with torch._dynamo.config.patch(error_on_recompile=True):  # nor for other texts, in a cache of their own
        found, wanted = (read(x, model, kind, ids.flip(0), cuts)[0] for x in (step, model))
    assert torch.equal(found, wanted)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("head_budgets", "cuts"), [("measured", [20, 1, 1, 1]), ("even", [20, 1, 19])])
@torch.no_grad()
def test_padding_goes_through_and_is_done_outside_the_graph_among_tokens_that_go_on(head_budgets, cuts):
    mask = (torch.arange(40) >= torch.tensor([[0], [7], [33]])).long()
    mask[0, 5:9], mask[1, 21], mask[0, 25:31] = 0, 0, 0
    model, fullgraph = compressed(head_budgets=head_budgets), cuts[-1] == 1
    compiled_as_eager(model, "static", tokens(3, 40), cuts, mask, fullgraph=fullgraph)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("kind", ["plain", "ragged", "default"])
@torch.no_grad()
def test_layers_with_features_are_one_graph_as_well(kind):
    model = dofla.linear.linearize(teacher("llama"), budget=24) if kind == "default" else own_student("llama", kind)
    _, calls = compiled_as_eager(model, "static", tokens(2, 24), [20, 1, 1, 1, 1])
    assert len(calls) <= 3  # a window may have other strides after a prompt than after a token
    assert all(set(names) == {"dofla.linear_attention"} for names in calls)


@pytest.mark.slow
@needs_kernels
@torch.no_grad()
def test_a_window_as_long_as_all_positions_is_no_pattern_in_a_graph():
    config = MistralConfig(**teacher("llama").config.to_dict() | {"sliding_window": 512, "model_type": "mistral"})
    options = {"head_budgets": "even", "prefill": "sequential"}
    model = compress(MistralForCausalLM(config).eval(), tokens(4, 48), tokens=48, **options)
    compiled_as_eager(model, "dynamic", tokens(2, 40), [20, *[1] * 6])


@pytest.mark.slow
@torch.no_grad()
def test_without_kernels_attention_stays_outside_the_graph(monkeypatch):
    monkeypatch.setattr(compiled, "obstacle", lambda: "switched off")
    _, calls = compiled_as_eager(compressed(), "dynamic", tokens(2, 30), [20, 1, 1, 8], fullgraph=False)
    assert calls
    assert not any(calls)


@needs_kernels
def test_generate_compiles_with_a_static_cache(tmp_path):
    compressed().save_pretrained(tmp_path)
    student = AutoModelForCausalLM.from_pretrained(tmp_path)
    backend = Graphs()
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    assert torch.equal(
        student.generate(ids, attention_mask=mask, **options, **static),
        student.generate(ids, attention_mask=mask, **options),
    )
    assert backend.calls == [["dofla.read_compressed.default"] * 2]
    assert backend.weights_given > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = tokens(2, 33)
        assert torch.equal(student.generate(other, **options, **static), student.generate(other, **options))


def of(backend):
    return CompileConfig(fullgraph=True, backend=backend)


@pytest.mark.slow
@needs_kernels
def test_a_compiled_model_writes_the_same_alone_in_batches_and_in_sessions():
    model, backend = compressed(), Graphs()
    compiled = CompiledModel(model, of(backend))
    before, session = dict(vars(model)), Session(compiled)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    # A session has a static cache of its own, a batch has one made for it; a cache that grows is left uncompiled.
    text = tokens(1, 40) % 95 + 1
    for turn in range(3):
        said = session.generate(text, **options)
        assert torch.equal(said, model.generate(text, **options))
        assert session.read == (39 if turn == 0 else 5)
        text = torch.cat([said, tokens(1, 5, seed=turn) % 95 + 1], 1)
    assert backend.calls == [["dofla.read_compressed.default"] * 2]
    assert backend.weights_given == 0
    batch = tokens(2, 33)
    assert torch.equal(compiled.generate(batch, **options), model.generate(batch, **options))
    made = len(backend.calls)
    cache = DynamicCache(config=model.config)
    assert torch.equal(compiled.generate(batch, past_key_values=cache, **options), model.generate(batch, **options))
    assert len(backend.calls) == made
    assert vars(model) == before


@pytest.mark.slow
@needs_kernels
def test_weights_in_int8_are_compiled():
    torchao = pytest.importorskip("torchao.quantization")
    model, options = compressed(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    assert torch.equal(
        CompiledModel(model).generate(tokens(1, 40), **options), model.generate(tokens(1, 40), **options)
    )


SCRIPT = """
import sys
import torch
from torch._dynamo.utils import counters
from test_compiling import CompiledModel, compressed, tokens
model, options = compressed(), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
model.to(getattr(torch, sys.argv[3]))
with torch.no_grad():
    model.lm_head.weight.mul_(float(sys.argv[1]))
if sys.argv[2] == "int8":
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
found = CompiledModel(model).generate(tokens(1, 20), **options)
assert torch.equal(found, model.generate(tokens(1, 20), **options))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("weights", "dtype"), [("plain", "float32"), ("int8", "bfloat16")])
def test_a_later_process_finds_the_graph_of_the_same_weights(tmp_path, weights, dtype):
    if weights == "int8":
        pytest.importorskip("torchao")
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, scale, weights, dtype], env=env, capture_output=True, text=True, check=True
        ).stdout
        for scale in ("1", "1", "-1")
    ]
    assert found == ["0 1\n", "1 0\n", "0 1\n"]


def test_the_digest_of_weights_is_of_all_parameters_and_buffers():
    model = compressed()
    digests = [Weights(model).uuid()]
    assert Weights(copy.deepcopy(model)).uuid() == digests[0]
    for tensor in (model.lm_head.weight, model.model.rotary_emb.inv_freq):
        with torch.no_grad():
            tensor.mul_(2)
        digests.append(Weights(model).uuid())
    assert len(set(digests)) == 3


def test_models_of_other_tensors_than_plain_ones_are_packed_as_torch_does():
    class Quantized(torch.Tensor):
        pass

    model = compressed()
    assert settings(model).keys() > PACKED.keys()
    model.register_buffer("codes", torch.zeros(2).as_subclass(Quantized))
    assert settings(model) == PACKED


def test_graphs_of_weights_in_int8_are_kept_if_all_are():
    torchao = pytest.importorskip("torchao.quantization")
    model, config = compressed().to(torch.bfloat16), torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    torchao.quantize_(model.model, config)
    assert settings(model) == PACKED  # mkldnn packs the output layer
    torchao.quantize_(model.lm_head, config)
    first = Weights(model)
    assert not first.plain
    with torch.no_grad():
        model.lm_head.weight.scale.mul_(2)
    assert Weights(model).uuid() != first.uuid()
    in_float32 = compressed()
    torchao.quantize_(in_float32, config)
    assert Weights(in_float32).plain


def in_place(model):
    with torch.no_grad():
        model.lm_head.weight.neg_()


def replaced(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def moved(model):
    model.lm_head.weight.data = -model.lm_head.weight.data


def trained(model):
    model(tokens(1, 8), labels=tokens(1, 8)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def loaded(model):
    model.load_state_dict({"lm_head.weight": -model.lm_head.weight}, strict=False)


def in_training(model):
    model.train()


@pytest.mark.slow
@pytest.mark.parametrize("change", [in_place, replaced, moved, trained, loaded, in_training])
def test_a_model_that_changed_is_compiled_again(change):
    model, backend = compressed(), Graphs("eager")
    compiled = CompiledModel(model, CompileConfig(backend=backend))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    for graphs in (1, 1, 2):
        if graphs == 2:
            change(model)
        assert torch.equal(compiled.generate(tokens(1, 20), **options), model.generate(tokens(1, 20), **options))
        assert len(backend.calls) == graphs
    CompiledModel(model, CompileConfig(backend=backend)).generate(tokens(1, 20), **options)
    assert len(backend.calls) == 3


@pytest.mark.slow
def test_a_model_that_was_restored_is_compiled_as_the_original():
    model, backend = compressed(), Graphs("eager")
    compiled, options = CompiledModel(model, CompileConfig(backend=backend)), {"max_new_tokens": 3, "do_sample": False}
    compiled.generate(tokens(1, 20), **options)
    dofla.restore(model)
    assert torch.equal(compiled.generate(tokens(1, 20), **options), model.generate(tokens(1, 20), **options))
    assert len(backend.calls) == 2


def test_generate_beside_softmax_layers_is_not_compiled(tiny):
    model = compress(teacher("llama"), tokens(4, 48), tokens=48, keep_softmax=["model.layers.0.self_attn"])
    with pytest.raises(DoflaError, match="some layers are softmax"):
        CompiledModel(model)
    with pytest.raises(DoflaError, match="BertModel writes no text"):
        CompiledModel(dofla.linear.linearize(tiny.bert()))
    with pytest.raises(DoflaError, match="not converted"):
        CompiledModel(tiny.llama())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_cache": False}])
def test_gradients_stay_outside_the_graph(options):
    student, ids = compressed(), tokens(2, 30)
    wanted = student(ids, labels=ids, **options).loss
    wanted.backward()
    gradients = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    student.zero_grad()
    step = torch.compile(student, backend=Graphs())
    if options:
        with pytest.raises(DoflaError, match="do not pack several sequences"):
            step(ids, position_ids=torch.arange(30)[None] % 15, **options)
    loss = step(ids, labels=ids, **options).loss
    loss.backward()
    assert gradients
    torch.testing.assert_close(loss, wanted, **LOGITS)
    for found, expected in zip((p.grad for p in student.parameters() if p.grad is not None), gradients, strict=True):
        torch.testing.assert_close(found, expected, **LOGITS)


@needs_kernels
@pytest.mark.long
@torch.no_grad()
def test_machine_code_gives_the_logits_and_the_text_of_eager():
    torch._dynamo.reset()
    student, ids = compressed(), tokens(2, 40)
    cache = cache_of(student, "static")
    student(ids, past_key_values=cache, use_cache=True)
    step = torch.compile(student, fullgraph=True)
    for token in tokens(2, 3, seed=3).split(1, 1):  # from the same state each, so that no rounding is in what was coded
        found = step(token, past_key_values=copy.deepcopy(cache), use_cache=True).logits
        torch.testing.assert_close(found, student(token, past_key_values=cache, use_cache=True).logits, **LOGITS)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    written = student.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(written, student.generate(ids, **options))
    compiled = CompiledModel(student)
    assert torch.equal(compiled.generate(ids, **options), written)
    with torch.no_grad():
        student.lm_head.weight.neg_()
    changed = student.generate(ids, **options)
    assert not torch.equal(changed, written)
    for again in (compiled, CompiledModel(student)):
        assert torch.equal(again.generate(ids, **options), changed)
