"""A student that answers otherwise with a cache than in one pass is refused when it is made; the model is as it was."""

import copy
from typing import ClassVar

import pytest
import torch
from sizes import compress
from tiny_families import CAUSAL, own_student, plan_for, teacher, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, LlamaAttention, apply_rotary_pos_emb

import dofla
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.consistency import check_consistency
from dofla.integration.converted import Converted, is_converted


class Attention(LlamaAttention):
    """That of Llama, with places to put a fault in."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        cache = kwargs.pop(CACHE_ARGUMENT, None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x(hidden_states).view(shape).transpose(1, 2) for x in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value, attention_mask = self.changed(key, value, attention_mask, cache)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape[:-2], -1)), weights

    def changed(self, key, value, mask, cache):
        return key, value, mask


class Stores(Attention):
    """What it hands to its attention function, another layer reads."""

    stored: ClassVar[dict] = {}

    def changed(self, key, value, mask, cache):
        self.stored.update(key=key, value=value)
        return key, value, mask


class Reads(Stores):
    """Attends to the keys of another layer, with which its own have been mixed, as far as there are any."""

    def changed(self, key, value, mask, cache):
        return (key + self.stored["key"]) / 2, (value + self.stored["value"]) / 2, mask


class AsksTheCache(Attention):
    """Takes for granted that the first layer's entry of the cache holds keys."""

    def changed(self, key, value, mask, cache):
        held = key if cache is None else cache.layers[0].keys
        return key + 0 * held[:, :, -1:], value, mask


class CutsTheMask(Attention):
    """Takes for granted that masks have four dimensions."""

    def changed(self, key, value, mask, cache):
        return key, value, mask if mask is None else mask[:, :, :, : key.shape[-2]]


def llama(*kinds, layers=3):
    """With attention of these kinds in its last layers, and the weights of others."""
    config = LlamaConfig(**copy.deepcopy(teacher("llama").config.to_dict()) | {"num_hidden_layers": layers})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    for index, kind in zip(range(layers - len(kinds), layers), kinds, strict=True):
        model.model.layers[index].self_attn.__class__ = kind
    return model


MAKE = {
    "linearize": lambda model, **options: dofla.linear.linearize(model, plan_for(model, **options)),
    "compress": lambda model: compress(model, tokens(12, 64), tokens=48, head_budgets="even"),
    "compress_measured": lambda model: compress(model, tokens(12, 64), tokens=96),
}


@pytest.mark.parametrize("make", sorted(MAKE))
@pytest.mark.parametrize(
    ("kinds", "layer", "reason"),
    [
        ([AsksTheCache], 2, r"a call with a cache fails \(IndexError: "),
        ([AsksTheCache, Attention], 1, r"a call with a cache fails \(IndexError: "),
        ([CutsTheMask], 2, r"a call with a cache fails \(IndexError: too many indices"),
    ],
)
def test_a_layer_that_does_not_go_with_ours_is_named_and_the_model_is_as_it_was(make, kinds, layer, reason):
    model, ids = llama(*kinds), tokens(2, 32)
    before, weights = model(ids).logits, copy.deepcopy(model.state_dict())
    message = rf"layer model\.layers\.{layer}\.self_attn cannot be converted: {reason}.*keep_softmax"
    with pytest.raises(dofla.DoflaError, match=message):
        MAKE[make](model)
    assert not is_converted(model)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert not any(hasattr(module, "dofla") for module in model.modules())


def test_a_softmax_layer_that_reads_the_keys_of_a_linear_one_is_refused():
    model, ids = llama(Stores, Reads), tokens(2, 32)
    before = model(ids).logits
    plan = plan_for(model, "softmax_last")
    with pytest.raises(dofla.DoflaError, match=r"layer model\.layers\.2\.self_attn cannot be converted: "):
        dofla.linear.linearize(model, plan)
    assert torch.equal(model(ids).logits, before)


def test_where_a_layer_counts_its_tokens_otherwise_the_difference_is_named():
    class Forgets(Attention):
        """Sees its newest keys alone where the cache gives it more."""

        def changed(self, key, value, mask, cache):
            length = key.shape[-2]
            factor = torch.tensor(1.0 if cache is None or cache.get_seq_length() == length else 3.0)
            asked = self.config._attn_implementation == "dofla"
            return key, value * factor.where(torch.tensor(asked), torch.tensor(1.0)), mask

    model = llama(Forgets, Attention)
    message = r"layer model\.layers\.1\.self_attn .* with a cache it answers otherwise than in one pass \(relative diff"
    with pytest.raises(dofla.DoflaError, match=message):
        MAKE["linearize"](model)
    assert not is_converted(model)


def test_a_model_that_fails_with_a_cache_by_itself_is_taken():
    class Fails(Attention):
        def forward(self, *args, **kwargs):
            cache = kwargs.get(CACHE_ARGUMENT)
            if cache is not None and cache.get_seq_length(self.layer_idx):
                raise RuntimeError("once only")
            return super().forward(*args, **kwargs)

    student = MAKE["linearize"](llama(Fails))
    assert student(tokens(2, 32), use_cache=False).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ragged", "eight_bits", "softmax_first"])
@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_students_pass_in_every_precision(family, kind):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        student = own_student(family, kind).to(dtype)
        check_consistency(student, lambda own=student: dofla.original(own))


@pytest.mark.parametrize("training", [True, False])
def test_a_trial_leaves_no_trace(training):
    model = llama().train(training)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        student = MAKE["linearize"](model)
        assert torch.equal(torch.rand(1), expected)
    assert student.training is training
    assert all(layer.training is training for layer in Converted.of(student).layers.values())
    assert all(weight.grad is None for weight in student.parameters())


@pytest.mark.slow
def test_a_trial_costs_what_some_dozen_tokens_do():
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True))
    student = dofla.linear.linearize(model.eval(), budget=64)
    with FlopCounterMode(display=False) as trial:
        check_consistency(student, lambda: dofla.original(student))
    with FlopCounterMode(display=False) as token, torch.no_grad():
        student(torch.zeros(1, 1, dtype=torch.long))
    assert 0 < trial.get_total_flops() < 64 * token.get_total_flops()
