"""Students under torch.compile: the whole step is one graph, and one graph does for all tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from arithmetic import LOGITS
from by_budget import compress
from tiny_families import own_student, teacher, tokens
from torch._dynamo import lookup_backend
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

needs_kernels = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))


class Graphs:
    """A backend that counts what it compiles, the calls of our operators in each graph, and the weights that are given
    to the last one instead of being part of it."""

    def __init__(self, backend: str = "aot_eager") -> None:
        torch._dynamo.reset()
        self.calls: list[list[str]] = []
        self.compile = lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.calls.append([name for name in names if name.startswith("dofla.")])
        self.weights_given = sum(isinstance(x, torch.nn.Parameter) for x in inputs)
        return self.compile(graph, inputs)

    def __deepcopy__(self, memo: dict) -> Graphs:
        return self  # transformers copies configurations


def compressed(family: str = "llama", dtype: torch.dtype = torch.float32, head_budgets: str = "even"):
    """A call of our operator per layer, or with measured head budgets one per size of a head."""
    return compress(teacher(family).to(dtype), tokens(4, 48), budget=24, head_budgets=head_budgets)


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


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(leaves(ours), leaves(theirs), strict=True))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("kind", "graphs"), [("static", 2), ("dynamic", 3)])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
@torch.no_grad()
def test_a_prompt_is_a_graph_and_all_tokens_are_another(family, dtype, kind, graphs):
    # A dynamic cache counts in a number, which becomes a symbol when the second token is compiled.
    student, ids, cuts = compressed(family, dtype), tokens(2, 40), [20, *[1] * 20]
    wanted, before = read(student, student, kind, ids, cuts)
    backend = Graphs()
    step = torch.compile(student, fullgraph=True, backend=backend)
    logits, states = read(step, student, kind, ids, cuts)
    assert backend.calls == [["dofla.attend_and_code.default"] * 2] * graphs
    assert torch.equal(logits, wanted)  # the same operations in the same order
    assert_equal(states, before)
    with torch._dynamo.config.patch(error_on_recompile=True):  # nor for other texts, in a cache of their own
        assert torch.equal(read(step, student, kind, ids.flip(0), cuts)[0], logits.flip(0))


@pytest.mark.slow
@needs_kernels
@torch.no_grad()
def test_padding_and_heads_of_several_sizes_go_through():
    student, ids = compressed(head_budgets="measured"), tokens(3, 40)
    mask = (torch.arange(40) >= torch.tensor([[0], [7], [33]])).long()
    mask[0, 5:9], mask[1, 21] = 0, 0
    wanted, before = read(student, student, "static", ids, [20, 1, 1, 1], mask)
    backend = Graphs()
    step = torch.compile(student, fullgraph=True, backend=backend)
    logits, states = read(step, student, "static", ids, [20, 1, 1, 1], mask)
    real = mask[:, :23].bool()
    assert torch.equal(logits[real], wanted[real])
    assert_equal(states, before)


@pytest.mark.slow
@needs_kernels
@torch.no_grad()
def test_padding_among_tokens_that_go_on_is_done_outside_the_graph():
    student, ids, cuts = compressed(), tokens(3, 40), [20, 1, 19]
    mask = (torch.arange(40) >= torch.tensor([[0], [7], [33]])).long()
    mask[0, 25:31] = 0
    wanted, before = read(student, student, "static", ids, cuts, mask)
    logits, states = read(torch.compile(student, backend=Graphs()), student, "static", ids, cuts, mask)
    assert torch.equal(logits[mask.bool()], wanted[mask.bool()])
    assert_equal(states, before)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("kind", ["plain", "ragged", "default"])
@torch.no_grad()
def test_students_with_features_are_one_graph_as_well(kind):
    student = dofla.linearize(teacher("llama"), budget=24) if kind == "default" else own_student("llama", kind)
    ids, backend = tokens(2, 24), Graphs()
    wanted, before = read(student, student, "static", ids, [20, 1, 1, 1, 1])
    step = torch.compile(student, fullgraph=True, backend=backend)
    logits, states = read(step, student, "static", ids, [20, 1, 1, 1, 1])
    assert len(backend.calls) <= 3  # a window may have other strides after a prompt than after a token
    assert all(set(names) == {"dofla.linear_attention"} for names in backend.calls)
    assert torch.equal(logits, wanted)
    assert_equal(states, before)


@pytest.mark.slow
@needs_kernels
@torch.no_grad()
def test_a_window_as_long_as_all_positions_is_no_pattern_in_a_graph():
    config = MistralConfig(**teacher("llama").config.to_dict() | {"sliding_window": 512, "model_type": "mistral"})
    student = compress(MistralForCausalLM(config).eval(), tokens(4, 48), budget=24, head_budgets="even")
    ids, cuts = tokens(2, 40), [20, *[1] * 6]
    wanted, before = read(student, student, "dynamic", ids, cuts)
    step = torch.compile(student, fullgraph=True, backend=Graphs())
    logits, states = read(step, student, "dynamic", ids, cuts)
    assert torch.equal(logits, wanted)
    assert_equal(states, before)


@needs_kernels
@pytest.mark.parametrize("opened", [False, True])
def test_generate_compiles_with_a_static_cache(opened, tmp_path):
    student = compressed()
    if opened:
        student.save_pretrained(tmp_path)
        student = AutoModelForCausalLM.from_pretrained(tmp_path)
    backend = Graphs()
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    assert torch.equal(
        student.generate(ids, attention_mask=mask, **options, **static),
        student.generate(ids, attention_mask=mask, **options),
    )
    assert backend.calls == [["dofla.attend_and_code.default"] * 2]
    assert backend.weights_given > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = tokens(2, 33)
        assert torch.equal(student.generate(other, **options, **static), student.generate(other, **options))


@pytest.mark.slow
@needs_kernels
def test_compiled_generate_writes_the_same_and_goes_on_with_sessions():
    student, plain, backend = compressed(), compressed(), Graphs()
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    assert dofla.compile_generate(student, config) is student
    sessions, _ = dofla.keep_sessions(student, static=True), dofla.keep_sessions(plain)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    # Alone it goes on from its session, a batch has a static cache made for it; a cache that grows is left uncompiled.
    text = tokens(1, 40)
    for turn in range(3):
        said = student.generate(text, **options)
        assert torch.equal(said, plain.generate(text, **options))
        assert sessions.read == (39 if turn == 0 else 5)
        text = torch.cat([said, tokens(1, 5, seed=turn)], 1)
    assert backend.calls == [["dofla.attend_and_code.default"] * 2]
    assert backend.weights_given == 0
    batch = tokens(2, 33)
    assert torch.equal(student.generate(batch, **options), plain.generate(batch, **options))
    made = len(backend.calls)
    cache = DynamicCache(config=student.config)
    assert torch.equal(student.generate(batch, past_key_values=cache, **options), plain.generate(batch, **options))
    assert len(backend.calls) == made


def test_generate_beside_softmax_layers_is_not_compiled():
    student = compress(teacher("llama"), tokens(4, 48), budget=24, keep_softmax=["model.layers.0.self_attn"])
    with pytest.raises(DoflaError, match="some layers are softmax"):
        dofla.compile_generate(student)


@pytest.mark.parametrize("wrap", [dofla.compile_generate, dofla.keep_sessions])
def test_an_encoder_is_told_that_it_writes_no_text(tiny, wrap):
    with pytest.raises(DoflaError, match="BertModel writes no text"):
        wrap(dofla.linearize(tiny.bert()))


@pytest.mark.slow
@torch.no_grad()
def test_without_kernels_attention_stays_outside_the_graph(monkeypatch):
    monkeypatch.setattr(compiled, "obstacle", lambda: "switched off")
    student, ids, backend = compressed(), tokens(2, 30), Graphs()
    wanted, _ = read(student, student, "dynamic", ids, [20, 1, 1, 8])
    logits, _ = read(torch.compile(student, backend=backend), student, "dynamic", ids, [20, 1, 1, 8])
    assert torch.equal(logits, wanted)
    assert backend.calls
    assert not any(backend.calls)


@pytest.mark.slow
def test_gradients_stay_outside_the_graph():
    student, ids = compressed(), tokens(2, 30)
    wanted = student(ids, labels=ids).loss
    wanted.backward()
    gradients = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    student.zero_grad()
    loss = torch.compile(student, backend=Graphs())(ids, labels=ids).loss
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
    assert torch.equal(dofla.compile_generate(student).generate(ids, **options), written)
