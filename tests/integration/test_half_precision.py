"""In half precision the feature maps and the states stay float32, and the answers stay near."""

import pytest
import torch
from tiny_families import CAUSAL, own_student, student, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DynamicCache

import dofla
from dofla.integration import precision
from dofla.integration.converted import Converted
from dofla.runs import opening as runs

MOST = {torch.bfloat16: 0.08, torch.float16: 0.01}
"""Half the sum of differences of probabilities, at most."""
HALVES = list(MOST)


def dtypes(model):
    maps = {id(p) for layer in Converted.of(model).layers.values() for p in layer.parameters()}
    return tuple({p.dtype for p in model.parameters() if (id(p) in maps) == inside} for inside in (True, False))


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits.float()


@pytest.mark.parametrize("dtype", HALVES)
def test_an_adapter_on_a_half_precision_base_keeps_float32_maps(dtype, tmp_path):
    base = dofla.restore(own_student("llama"))
    base.to(dtype).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plan = student("llama", "ragged").config.quantization_config.plan
    dofla.linear.linearize(model, plan)
    dofla.save_adapter(model, tmp_path / "adapter")
    opened = dofla.load(tmp_path / "adapter")
    assert dtypes(opened) == dtypes(model) == ({torch.float32}, {dtype})
    assert_close(logits(opened, tokens(1, 9)), logits(model, tokens(1, 9)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        *[(family, "plain", torch.bfloat16) for family in CAUSAL],
        *[("llama", kind, dtype) for kind in ("ragged", "softmax_first", "eight_bits") for dtype in HALVES],
    ],
)
def test_half_precision_answers_are_near_those_of_float32(family, kind, dtype):
    ids = tokens(2, 70)
    whole = student(family, kind)
    model = own_student(family, kind).to(dtype)
    expected, got = logits(whole, ids), logits(model, ids)
    assert got.isfinite().all()
    assert (got.softmax(-1) - expected.softmax(-1)).abs().sum(-1).mean() / 2 < MOST[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "ragged"), ("gpt2", "plain"), ("opt", "ragged"), ("llama", "eight_bits")]
)
def test_states_are_float32_and_exact_tokens_have_the_dtype_of_the_model_or_eight_bits(family, kind, dtype):
    model = own_student(family, kind).to(dtype)
    ids = tokens(2, 30)
    cache = DynamicCache(config=model.config)
    whole = logits(model, ids)
    pieces = [logits(model, piece, past_key_values=cache) for piece in ids.split([20, *[1] * 10], 1)]
    assert (torch.cat(pieces, 1).softmax(-1) - whole.softmax(-1)).abs().sum(-1).mean() / 2 < MOST[dtype]
    for entry in cache.layers:
        for state in entry.states:
            assert (state.features.mean.dtype, state.features.log_mass.dtype) == (torch.float32, torch.float64)
            for buffer in (state.window, state.sinks):
                kept_in = torch.int8 if kind == "eight_bits" else dtype
                assert buffer is None or {buffer.key.dtype, buffer.value.dtype} == {kept_in}
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert generated.shape == (2, 35)


@pytest.mark.parametrize(("family", "kind"), [("llama", "ragged"), ("gpt2", "plain"), ("bert", "ragged")])
def test_mixed_precision_leaves_the_linear_layers_alone(family, kind):
    model, seen = own_student(family, kind).train(), []
    for layer in Converted.of(model).layers.values():
        layer.register_forward_hook(lambda *call: seen.append(call), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(2, 30))[0].float().square().mean().backward()
    for layer, args, kwargs, (out, _) in seen:
        assert_close(out, layer.forward(*args, **kwargs)[0], rtol=0, atol=0)
        assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_a_double_precision_model_computes_in_double_precision():
    model, seen = own_student("llama", "ragged").double(), []
    for layer in Converted.of(model).layers.values():
        layer.register_forward_hook(lambda layer, args, out: seen.extend([args[0].dtype, out[0].dtype]))
    assert model(tokens(1, 9)).logits.dtype == torch.float64
    assert set(seen) == {torch.float64}


@pytest.mark.parametrize(
    ("dtype", "supported", "said"),
    [(torch.bfloat16, False, 1), (torch.float16, False, 1), (torch.bfloat16, True, 0), (torch.float32, False, 0)],
)
def test_a_processor_without_instructions_for_half_precision_is_named_once(dtype, supported, said, monkeypatch, caplog):
    precision.warn_of_slow_products.cache_clear()
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: supported, raising=False)
    for _ in range(2):
        dofla.linear.linearize(dofla.restore(own_student("llama")).to(dtype))
    found = [record.getMessage() for record in caplog.records if record.name == precision.__name__]
    assert len(found) == said
    assert all(str(dtype).removeprefix("torch.") in line and "--set dtype=float32" in line for line in found)
    precision.warn_of_slow_products.cache_clear()


@pytest.mark.parametrize(("slow", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_command_line_opens_models_as_they_are_where_that_is_not_slow(slow, dtype, monkeypatch):
    monkeypatch.setattr(runs, "half_is_slow", lambda: slow)
    assert runs.open_original("demo")[0].dtype == dtype
    assert runs.open_original("demo", "bfloat16")[0].dtype == torch.bfloat16
