"""What linear attention cannot express is refused by name and with the reason, before anything is changed; whole
families that are refused are tested in tests/families."""

import copy

import pytest
import torch
from sizes import compress
from students import everything
from tiny_families import own_student, plan_for, student, teacher, tokens
from transformers import MistralForCausalLM

import dofla
from dofla.integration.converted import Converted, is_converted
from dofla.integration.sites import attention_sites


@pytest.mark.parametrize(
    ("family", "layer", "reason"),
    [
        ("gemma2", "model.layers.1.self_attn", "soft-capped"),
        ("gpt_oss", "model.layers.1.self_attn", "its attention sinks are parameters"),
        ("bart", "model.decoder.layers.0.encoder_attn", "cross-attention"),
        ("gpt2_crossing", "transformer.h.0.crossattention", "cross-attention"),
        ("bert_crossing", "bert.encoder.layer.0.crossattention.self", "cross-attention"),
        ("t5", "encoder.block.0.layer.0.SelfAttention", "position bias"),
        ("mistral_sliding", "model.layers.0.self_attn", "a bounded window already"),
        ("gemma3", "model.layers.0.self_attn", "a bounded window already"),
        ("diffllama", "model.layers.0.self_attn", "more than once in a pass"),
        ("falcon_h1", "model.layers.0.self_attn", "shares its entry of the cache with a recurrent layer"),
    ],
)
def test_a_layer_that_cannot_be_linear_is_refused_by_name(tiny, family, layer, reason):
    model = teacher(family)
    plan = tiny.plan(model)
    first = next(n for n, x in enumerate(plan.layers) if x.name == layer)
    plan.layers.insert(0, plan.layers.pop(first))
    with pytest.raises(dofla.DoflaError, match=rf"layer {layer} cannot be converted: .*{reason}.*keep_softmax"):
        dofla.linear.linearize(model, plan)
    if family in ("gemma2", "gpt_oss"):
        with pytest.raises(dofla.DoflaError, match=rf"layer {layer} cannot be converted: .*{reason}"):
            dofla.linear.profile(model, tokens(2, 16))


BLOCKS = torch.block_diag(torch.ones(5, 5), torch.ones(5, 5)).tril().bool()[None, None]
"""A mask of two sequences in one row."""
STATIC = {"cache_implementation": "static", "max_new_tokens": 4}


@pytest.mark.parametrize(("attempt", "match"), [
    (lambda: attention_sites(teacher("splinter")),
     r"layer encoder\.layer\.0\.attention\.self does not say whether it is causal"),
    (lambda: dofla.linear.linearize(own_student("llama"), dofla.linear.Plan([])), "converted already"),
    (lambda: dofla.restore(teacher("llama")), "not converted"),
    (lambda: dofla.original(teacher("llama")).__enter__(), "not converted"),
    (lambda: dofla.linear.linearize(teacher("llama"), plan_for(teacher("gpt2"))),
     r"another model: it names 'transformer\.h\.0\.attn'.*GPT2LMHeadModel"),
    (lambda: student("llama")(tokens(1, 10), attention_mask=BLOCKS),
     r"layer model\.layers\.0\.self_attn got a 4-dimensional .* mask"),
    (lambda: student("llama")(tokens(1, 10), output_attentions=True), "output_attentions"),
    (lambda: student("bert")(tokens(1, 10), output_attentions=True), "output_attentions"),
    (lambda: own_student("llama").dequantize(), r"dofla\.restore gives the original back"),
    (lambda: student("llama", "softmax_first").generate(tokens(1, 10), **STATIC), "static cache"),
    (lambda: student("llama", "softmax_last").generate(tokens(1, 10), **STATIC), "static cache"),
])  # fmt: skip
def test_what_there_is_not_is_refused_with_the_reason(attempt, match):
    with pytest.raises(dofla.DoflaError, match=match):
        attempt()


def test_a_model_that_does_not_run_says_so_itself(monkeypatch):
    model = teacher("llama")
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", lambda x: x + torch.zeros(3))
    with pytest.raises(RuntimeError, match="size of tensor"):
        attention_sites(model)


@pytest.mark.parametrize("make", [
    lambda model: compress(model, tokens(12, 32), tokens=48),
    lambda model: compress(model, tokens(12, 32), tokens=48, head_budgets="even"),
    lambda model: dofla.linear.linearize(model, budget=8),
    lambda model: dofla.linear.measure_curves(model, tokens(12, 32), 8),
    lambda model: dofla.calibrate(model, tokens(12, 32)),
    lambda model: dofla.linear.profile(model, tokens(12, 32)),
])  # fmt: skip
def test_where_all_windows_are_bounded_nothing_is_begun(make):
    model = teacher("mistral_sliding")
    before = model(tokens(2, 32)).logits
    match = "MistralForCausalLM: no layer is left to convert: .* unless it is opened with sliding_window=None"
    with pytest.raises(dofla.DoflaError, match=match):
        make(model)
    assert not is_converted(model)
    assert torch.equal(model(tokens(2, 32)).logits, before)


def test_opened_without_its_window_such_a_model_is_linearized():
    config = copy.deepcopy(teacher("mistral_sliding").config)
    config.sliding_window = None
    model = compress(MistralForCausalLM(config).eval(), tokens(12, 32), tokens=48, head_budgets="even")
    assert len(Converted.of(model).plan.layers) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keep_softmax": "model.layers.1.self_attn"}, r"keep_softmax is 'model.layers.1.self_attn': give a list of"),
        ({"keep_softmax": [f"model.layers.{n}.self_attn" for n in range(2)]}, "no layer is left to convert"),
        ({"ratio": 8}, "size is .* and ratio is 8: give one of them"),
    ],
)
@pytest.mark.parametrize("head_budgets", ["measured", "even"])
def test_options_of_compress_are_checked_first(change, match, head_budgets):
    model = teacher("llama")
    with pytest.raises(dofla.DoflaError, match=match):
        compress(model, tokens(12, 64), **{"tokens": 48, "head_budgets": head_budgets} | change)
    assert not is_converted(model)


def test_within_inference_mode_students_are_made_as_ever():
    outside = compress(teacher("llama"), tokens(12, 64), tokens=96)
    model = teacher("llama")
    with torch.inference_mode():
        inside = compress(model, tokens(12, 64), tokens=96)
    assert Converted.of(inside).plan == Converted.of(outside).plan
    assert torch.equal(inside(tokens(1, 60)).logits, outside(tokens(1, 60)).logits)
    assert not any(x.is_inference() for x in (*inside.parameters(), *inside.buffers()))


def test_whatever_fails_without_its_own_masks_is_refused(monkeypatch):
    model = teacher("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def asks_for_a_mask(*args, **kwargs):
        if attention.config._attn_implementation == "dofla_recording":
            return None.shape  # as Qwen4-Exp's
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", asks_for_a_mask)
    with pytest.raises(dofla.DoflaError, match=r"does not run without attention masks of its own .*'shape'"):
        dofla.linear.linearize(model, budget=8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda plan: plan.layers.pop(), r"says nothing of 'model\.layers\.1\.self_attn'"),
        *(
            (lambda plan, what=what: setattr(plan.layers[1], what, 3), rf"1\.self_attn has {what} \d, the plan says 3")
            for what in ("kv_heads", "head_dim", "value_dim")
        ),
    ],
)
def test_a_plan_for_other_layers_is_refused_and_the_model_is_as_it_was(change, match):
    model = teacher("llama")
    plan = plan_for(model)
    change(plan)
    with pytest.raises(dofla.DoflaError, match=match):
        dofla.linear.linearize(model, plan)
    assert everything(model) == everything(teacher("llama"))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_four_dimensional_mask_of_padding_is_read_as_such(dtype):
    model, padding = student("llama"), torch.tensor([[0, 0, *[1] * 8], [1] * 10])
    full = padding[:, None, None].bool() & torch.ones(10, 10, dtype=torch.bool).tril()
    if dtype != torch.bool:
        full = torch.zeros(full.shape).masked_fill(~full, torch.finfo(dtype).min)
    found, wanted = (model(tokens(2, 10), attention_mask=mask).logits for mask in (full, padding))
    assert torch.equal(found[padding.bool()], wanted[padding.bool()])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "qwen3"])
def test_sequences_packed_into_one_row_are_refused(family):
    model = student(family)
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    with pytest.raises(dofla.DoflaError, match=r"layer .*0.* do not pack several sequences into one row"):
        model(tokens(1, 10), position_ids=packed, use_cache=False)


@pytest.mark.parametrize("past", [0, 30])
@pytest.mark.parametrize("kind", ["ragged", "softmax_first"])
def test_tokens_that_a_mask_does_not_reach_are_padding_as_they_are_to_the_original(kind, past):
    ids, model = tokens(2, 60), own_student("llama", kind).double()
    for length in (past + 12, past + 25):
        mask = torch.ones(2, length, dtype=torch.long)
        padded = torch.nn.functional.pad(mask, (0, 60 - length))
        found, expected = (
            model(
                ids[:, past:], attention_mask=x, past_key_values=model(ids[:, :past]).past_key_values if past else None
            )
            for x in (mask, padded)
        )
        real = slice(0, length - past)
        assert torch.equal(found.logits[:, real], expected.logits[:, real])
