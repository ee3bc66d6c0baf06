"""A decoded token of the Triton kernels in torch.compile's graphs: one operator per layer, states in their place."""

import pytest
import torch
from device import INTERPRETED, calls_of_kernels, needs_device
from gpu_caches import SCALING, cache_of, moved, read, text_of
from graphs import Graphs
from sizes import compress
from tiny_families import teacher, tokens
from transformers import DynamicCache, StaticCache

from dofla.attention.gpu.operators import decode_token
from dofla.integration import cache as entries

pytestmark = needs_device


@pytest.fixture(autouse=True)
def cuda_graphs(monkeypatch):
    """In the interpreter as well."""
    if INTERPRETED:
        monkeypatch.setattr(entries, "in_cuda_graphs", lambda x: True)


@pytest.mark.interpreter
@torch.no_grad()
def test_the_operator_says_what_it_changes():
    heads, before = cache_of("while sinks fill")
    text = moved(text_of(heads, 2, before + 1, 1))
    heads = moved(heads)
    with calls_of_kernels():
        _, state = read(heads, text, [0, before])
        wanted, after = read(heads, text, [before, before + 1], state)
        given = *(x[:, :, before:] for x in text), None, state.rows, heads.register(), SCALING
        torch.library.opcheck(decode_token, given, test_utils=("test_schema", "test_faketensor"))
        assert torch.equal(decode_token(*given), wanted)
    assert torch.equal(state.rows, after.rows)


def steps(call, model, ids, mask, cache):
    """Logits of a prompt and of tokens after it, and where the state of the first layer is after each."""
    found, places = [model(ids[:, :9], attention_mask=mask, past_key_values=cache).logits], []
    for n in range(9, ids.shape[1]):
        own = None if mask is None else torch.nn.functional.pad(mask, (0, n - 8), value=1)
        with calls_of_kernels():  # prompts are read by others
            found.append(call(ids[:, n : n + 1].clone(), attention_mask=own, past_key_values=cache).logits)
        places.append(cache.layers[0].states[0].rows.data_ptr())
    return torch.cat(found, 1), places


@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.interpreter), "dynamic", "padded"])
@torch.no_grad()
def test_a_step_is_one_graph_that_updates_a_static_cache_in_place(kind):
    model = moved(compress(teacher("llama"), tokens(4, 48), tokens=24, head_budgets="even"))
    ids, mask = moved(tokens(2, 12)), None
    if kind == "padded":
        mask = moved((torch.arange(9) >= torch.tensor([[3], [0]])).long())
    wanted, _ = steps(model, model, ids, mask, DynamicCache(config=model.config))
    backend = Graphs()
    step = torch.compile(model, fullgraph=True, backend=backend)
    own = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, 64)
    found, places = steps(step, model, ids, mask, own)
    assert backend.calls == [["dofla.decode_token.default"] * 2] * len(backend.calls)
    assert torch.equal(found, wanted)
    if kind == "static":
        assert len(backend.calls) == 1
        assert len(set(places)) == 1
        assert int(own.get_seq_length()) == ids.shape[1]
        own.reset()  # for the next text, whose states stand where they stood
        with torch._dynamo.config.patch(error_on_recompile=True):
            again, there = steps(step, model, ids[:, :10].flip(0), mask, own)
        assert torch.equal(again, wanted[:, :10].flip(0))
        assert there == places[:1]
