"""How many positions a model has, whatever its configuration calls them and wherever they begin."""

import pytest
import torch
from sizes import compress
from tiny_families import POSITIONS, teacher, tokens
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, WhisperConfig, WhisperForCausalLM

import dofla
from dofla.integration.converted import Converted
from dofla.integration.positions import positions_of
from dofla.integration.reading import check_readable

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "initializer_range": 0.2, "is_decoder": True, "max_position_embeddings": 130}
WHISPER = {"vocab_size": 96, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
WHISPER |= {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "max_target_positions": 128}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
AFTER_PADDING = ["camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"]


def model_of(family):
    if family == "whisper":
        return WhisperForCausalLM(WhisperConfig(**WHISPER)).eval()
    languages = {"languages": ["en"], "default_language": "en"} if family == "xmod" else {}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES, pad_token_id=1, **languages)).eval()


@pytest.mark.parametrize(
    "family", ["roberta", "whisper", *(pytest.param(family, marks=pytest.mark.slow) for family in AFTER_PADDING)]
)
def test_shares_are_measured_within_the_positions_that_there_are(family):
    model = model_of(family)
    assert positions_of(model) == 128
    ids = tokens(6, 64) % 90 + 4
    check_readable(model, ids.view(3, 128), "it")
    with pytest.raises(dofla.DoflaError, match=r"129 tokens, and .* has 128 positions"):
        check_readable(model, torch.full((1, 129), 4), "it")
    assert model(ids.view(3, 128)).logits.isfinite().all()
    student = compress(model, ids, tokens=96)
    assert {layer.positions for layer in Converted.of(student).layers.values()} == {128}
    assert student(ids.view(3, 128)).logits.isfinite().all()


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert_decoder"])
def test_all_others_have_as_many_as_they_say(family):
    assert positions_of(teacher(family)) == POSITIONS
