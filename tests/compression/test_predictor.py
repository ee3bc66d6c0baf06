"""What predicts the importance of tokens, against a regression in float64."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sizes import compress
from tiny_families import teacher, tokens
from transformers import DynamicCache

import dofla
from dofla.compression.importance import FIRST, LEAST, RIDGE, _Fit, measure_importance
from dofla.data.python_text import EXCERPT, MODULES, python_text
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.converted import Converted
from dofla.integration.recorder import recording, run_body
from dofla.integration.sites import attention_sites
from dofla.layers import ImportancePredictor

FIRST_LAYER = "model.layers.0.self_attn"


def read(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=True, **{CACHE_ARGUMENT: DynamicCache(config=model.config)}, **options)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_those_of_ridge_regression(family):
    model, texts, told = teacher(family).double(), [*tokens(2, 45), tokens(1, 30)[0]], []
    names = list(attention_sites(model))
    found = measure_importance(model, names, texts, told.append)
    assert told == [90, 90, 60]
    for name in names:
        rows, wanted = [], []
        for text in texts:
            calls, inputs = [], []
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kwargs, inputs=inputs: inputs.append((*args, *kwargs.values())[0]), with_kwargs=True
            )
            with torch.no_grad(), recording(model, [name], calls.append):
                run_body(model, {"input_ids": text.repeat(1, 2)})
            hook.remove()
            n, (call,) = len(text), calls
            shares = call.log_weights().double().exp()[0, :, n:, :n].square().sum(1)  # [H, n]
            rows.append(torch.cat([inputs[0][0, FIRST:n], torch.ones(n - FIRST, 1)], 1).double())
            wanted.append((shares.unflatten(0, (call.key.shape[1], -1)).sum(1).T[FIRST:] + LEAST).log())
        x, y = torch.cat(rows), torch.cat(wanted)
        square = x.T @ x
        penalty = RIDGE * square.diagonal()
        penalty[-1] = 0
        right = torch.linalg.solve(square + penalty.diag(), x.T @ y)
        torch.testing.assert_close(found[name].double(), right.T, rtol=1e-2, atol=1e-3)


def test_a_dimension_that_is_larger_than_all_others_hides_none():
    """As in models whose residual stream has some, and no norm before attention."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2000, 16, generator=generator), torch.randn(2, 17, generator=generator)
    for size in (1, 3000):
        inputs, fit = hidden.clone(), _Fit()
        inputs[:, 3] += size
        right = hidden @ weight[:, :16].T
        fit.add(inputs, right.exp().T)
        predictor = ImportancePredictor(2, 16)
        predictor.weight.copy_(fit.weight())
        found = predictor(inputs[None])[0].log().T
        for n in range(2):
            assert torch.corrcoef(torch.stack([found[:, n], right[:, n].clamp(-9, 4)]))[0, 1] > 0.9


def test_importance_is_the_exponential_of_a_linear_function():
    predictor, hidden = ImportancePredictor(3, 8), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(predictor(hidden), torch.ones(2, 3, 5))
    predictor.weight.copy_(torch.randn(3, 9, generator=torch.Generator().manual_seed(1)))
    logarithm = hidden.double() @ predictor.weight[:, :8].double().T + predictor.weight[:, 8]
    right = logarithm.clamp(-10, 4).exp().mT
    torch.testing.assert_close(predictor(hidden).double(), right, rtol=1e-5, atol=0)
    part = ImportancePredictor(1, 8)
    part.take(predictor, [2])
    torch.testing.assert_close(part(hidden), predictor(hidden)[:, 2:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_prompts_are_read_by_it_and_what_was_saved_reads_them_so(family, importances, tmp_path):
    """In calls that go on too, but of single tokens."""
    model, ids = teacher(family), tokens(2, 100)
    compress(model, tokens(4, 96), head_budgets="even")
    importances.clear()
    read(model, ids)
    first = importances[:]
    assert all(x.shape[::2] == (2, 100) for x in first)
    model.save_pretrained(tmp_path)
    importances.clear()
    read(dofla.load(tmp_path), ids)
    assert all(map(torch.equal, first, importances))
    importances.clear()
    cache = read(model, ids[:1])[1]
    layers = len(importances)
    with torch.no_grad():
        for more in (70, 9, 1):
            model(tokens(1, more), use_cache=True, **{CACHE_ARGUMENT: cache})
    lengths = [None if x is None else x.shape[2] for x in importances[layers:]]
    assert lengths == layers * [70] + layers * [9] + layers * [None]


def test_without_it_the_attention_of_the_prompt_decides(tiny, importances, tmp_path):
    path, windows = tmp_path / "calibration.safetensors", tiny.tokens(2, 96)
    dofla.calibrate(tiny.llama(), windows).save(path)
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file({name: x for name, x in tensors.items() if not name.endswith(":importance")}, path, metadata)
    model = dofla.compress(tiny.llama(), size="4KB", calibration=path)
    importances.clear()
    out = read(model, windows).logits
    assert all(x is None for x in importances)
    torch.testing.assert_close(out, tiny.llama()(windows).logits, rtol=0, atol=1e-4)


def test_heads_that_hold_every_token_need_none(tiny):
    model = dofla.compress(tiny.llama(), tiny.tokens(2, 96), evict=False)
    assert all(layer.predictor is None for layer in Converted.of(model).layers.values())


def test_an_input_of_another_form_predicts_nothing(tiny, importances):
    model = dofla.compress(tiny.llama(), tiny.tokens(2, 96), "4KB")
    layer = Converted.of(model).layers[FIRST_LAYER]
    layer.predictor = ImportancePredictor(2, 7)
    importances.clear()
    read(model, tiny.tokens(1, 80))
    assert [x is None for x in importances] == [True, False]


def test_python_tells_of_itself(monkeypatch):
    texts = python_text()
    assert len(texts) == 2 * len(MODULES)
    assert max(map(len, texts)) == EXCERPT
    assert "import " in texts[1]
    monkeypatch.setattr("dofla.data.python_text.import_module", lambda name: __import__("no_such_module"))
    assert python_text() == []
