"""Encoder-decoders of which the decoder's own attention becomes linear: both sides read the text that is measured."""

import pytest
import torch
from sizes import compress
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
)

import dofla
from dofla.integration.converted import Converted
from dofla.integration.sites import attention_sites

SIZES = {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 128, "init_std": 0.2, "decoder_start_token_id": 1}
SIZES |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
SIZES |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIDE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDE |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "attn_logit_softcapping": None}
SIDE |= {"layer_types": ["full_attention"] * 2}
FAMILIES = dict.fromkeys(("bart", "blenderbot", "m2m_100", "marian", "pegasus"), SIZES)
FAMILIES |= {"t5gemma": {"encoder": SIDE, "decoder": SIDE, "vocab_size": 96}}


@pytest.fixture(params=FAMILIES)
def model(request):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[request.param](**FAMILIES[request.param])).eval()


def to_keep(model):
    return [name for name, site in attention_sites(model).items() if site.refusal or not site.causal]


@pytest.mark.parametrize("head_budgets", ["even", pytest.param("measured", marks=pytest.mark.slow)])
def test_a_decoder_fades_and_the_model_is_given_back(model, head_budgets, tiny):
    ids = tiny.tokens(2, 40) % 90 + 3
    with torch.no_grad():
        before = model(input_ids=ids, decoder_input_ids=ids).logits
    student = compress(
        model, tiny.tokens(6, 64, seed=1) % 90 + 3, tokens=48, head_budgets=head_budgets, keep_softmax=to_keep(model)
    )
    assert len(Converted.of(student).layers) == 2
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    written = student.generate(ids, **options)
    assert torch.equal(written, student.generate(ids, use_cache=False, **options))
    assert dofla.evaluate(student, tiny.tokens(2, 40) % 90 + 3).kl >= 0
    with torch.no_grad():
        assert torch.equal(dofla.restore(student)(input_ids=ids, decoder_input_ids=ids).logits, before)


@pytest.mark.parametrize("kind", [BartForCausalLM, BartForConditionalGeneration])
@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_windows_of_half_the_positions_and_more_are_read(kind, length, tiny):
    windows = tiny.tokens(4, length) % 90 + 3

    def fresh():
        return kind(BartConfig(**SIZES)).eval()

    student = compress(fresh(), windows, tokens=24, keep_softmax=to_keep(fresh()))
    assert dofla.evaluate(student, windows).kl >= 0
    if kind is BartForCausalLM:
        student = dofla.linear.linearize(fresh(), budget=8)
        dofla.linear.distill(student, windows, steps=1)
        assert dofla.evaluate(student, windows).kl >= 0
    with pytest.raises(dofla.DoflaError, match=r"129 tokens, and \w+ has 128 positions: take fewer"):
        compress(fresh(), tiny.tokens(4, 129), tokens=24, keep_softmax=to_keep(fresh()))


def test_where_all_is_kept_nothing_is_left(model, tiny):
    with pytest.raises(dofla.DoflaError, match="no layer is left to convert"):
        compress(model, tiny.tokens(6, 64), tokens=48, keep_softmax=list(attention_sites(model)))


@torch.no_grad()
def test_a_decoder_that_writes_more_than_the_encoder_read_sees_its_padding(model, tiny):
    compress(model, tiny.tokens(6, 64) % 90 + 3, tokens=48, head_budgets="even", keep_softmax=to_keep(model))
    ids, written = tiny.tokens(1, 9) % 90 + 3, tiny.tokens(1, 20, seed=1) % 90 + 3
    mask = (torch.arange(14) < 9).long()[None]
    padded = model(torch.nn.functional.pad(ids, (0, 5)), attention_mask=mask, decoder_input_ids=written).logits
    alone = model(ids, decoder_input_ids=written).logits
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-4 * alone.abs().max().item())
