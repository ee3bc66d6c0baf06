"""The bundled teacher must need its attention, and distant tokens too: only then can a student lose anything."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dofla.runs.demo import TASKS, model_path
from dofla.tasks import load_task

WINDOW = 16


def uniform_attention(module, query, key, value, attention_mask, **kwargs):
    """The mean of all values so far, whatever the query."""
    seen = torch.arange(1, value.shape[-2] + 1, dtype=value.dtype)
    return (value.cumsum(-2) / seen[:, None]).transpose(1, 2), None


def window_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Softmax attention to the last ``WINDOW`` tokens."""
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril().triu(1 - WINDOW)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    return out.transpose(1, 2), None


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    for name, function in (("uniform", uniform_attention), ("window", window_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def documents(tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    texts = [item.question for item in load_task(TASKS / "recall_far-test.jsonl.gz").items[:8]]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :512] for text in texts]


@pytest.fixture(scope="module")
def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    """Stories by the teacher itself, as the training stories are no part of the repository."""
    torch.manual_seed(0)
    start = torch.full((8, 1), tokenizer.bos_token_id)
    options = {"attention_mask": torch.ones_like(start), "do_sample": True}
    return list(model.generate(start, **options, min_length=100, max_length=100).split(1))


@torch.no_grad()
def loss(model: PreTrainedModel, texts: list[torch.Tensor], attention: str) -> float:
    """Nats per token with the given attention."""
    model.set_attn_implementation(attention)
    total = sum(model(text, labels=text).loss.item() * (text.shape[1] - 1) for text in texts)
    model.set_attn_implementation("sdpa")
    return total / sum(text.shape[1] - 1 for text in texts)


@torch.no_grad()
def recalls(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> bool:
    asked = tokenizer(prompt, return_tensors="pt")
    expected = tokenizer.encode(" " + answer, add_special_tokens=False)
    decoded = model.generate(**asked, do_sample=False, max_new_tokens=len(expected))
    return decoded[0, asked.input_ids.shape[1] :].tolist() == expected


@pytest.mark.slow
def test_uniform_attention_costs_a_nat_and_nearby_tokens_do_not_suffice(model, documents, samples):
    for texts, attention, gap in ((documents + samples, "uniform", 1.0), (documents, "window", 0.3)):
        assert loss(model, texts, attention) - loss(model, texts, "sdpa") >= gap


@pytest.mark.slow
def test_names_are_recalled_over_a_distance(model, tokenizer):
    items = load_task(TASKS / "recall_far-test.jsonl.gz").items[:20]
    accuracy = sum(recalls(model, tokenizer, x.question, x.choices[x.answer]) for x in items) / len(items)
    assert accuracy >= 0.9


def test_the_card_says_what_was_measured(tokenizer):
    folder = model_path()
    card = ModelCard.load(folder / "README.md")
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert card.data.license == re.search('^license = "(.*)"$', project, re.MULTILINE)[1].lower()
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    measured = record["written"]
    assert measured["stories_loss"] < 0.4 * math.log(len(tokenizer))
    assert f"{record['parameters']:,} parameters" in card.text
    steps = record["settings"]["steps"]
    assert f"{record['tokens']:,} tokens: {steps:,} steps of {record['tokens'] // steps:,} tokens" in card.text
    assert f"| loss on stories | {measured['stories_loss']:.2f} nats" in card.text
    assert f"| loss on recall documents | {measured['recall_loss']:.2f} nats" in card.text
    for distance in (60, 300):
        assert f"over {distance} tokens, greedily | {100 * measured[f'recall_at_{distance}']:.0f} %" in card.text
    weights = list(folder.glob("*.safetensors"))
    assert 0 < sum(file.stat().st_size for file in weights) <= 8_000_000
