"""Fine-tuning: softmax models and students, all weights or low-rank ones, by the paper's settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig
from word_tokenizers import word_tokenizer

from dofla.errors import DoflaError
from dofla.integration.surgery import linearize
from dofla.paper.finetune import finetune, settings_for
from dofla.tasks import KNOWN, STYLES, Item, Task, score

WORDS = ["<end>", "<unk>", "Question", "Answer", ":", "left", "right", *(f"w{n}" for n in range(50))]
# The answer is one of two words. Questions have several lengths, so that batches are padded.
ITEMS = [Item(f"w{n}" + f" w{n}" * (n % 3), ("left", "right"), n // 3 % 2, id=n) for n in range(24)]
TASK = Task("toy", "question", ITEMS)
ONE = {"learning_rate": 1e-2, "batch_size": 4, "epochs": 1}


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS, eos_token="<end>")


@pytest.fixture(params=["llama", "llama student", "gpt2", "gpt2 student"])
def model(tiny, request):
    family, _, student = request.param.partition(" ")
    made = getattr(tiny, family)(initializer_range=0.1)
    return linearize(made, tiny.plan(made, 8)) if student else made


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 8])
def test_any_model_learns_the_task_and_feature_maps_stay(model, tokenizer, lora_rank):
    # With the embeddings of random models frozen, low-rank updates can learn a few items by heart, not many.
    task = replace(TASK, items=ITEMS[:8] if lora_rank else ITEMS)
    how = {"learning_rate": 2e-2, "epochs": 24} if lora_rank else {"learning_rate": 5e-3, "epochs": 12}
    before, losses = weights(model), []
    options = {"progress": lambda step, steps, text: losses.append(float(text.split()[-1])), "lora_rank": lora_rank}
    accuracies = finetune(model, tokenizer, task, task, batch_size=4, **how, **options)
    assert len(accuracies) == how["epochs"]
    assert accuracies[0] < 0.9
    assert max(accuracies) == 1
    assert losses[-1] < 0.6 * losses[0]
    changed = {name for name, weight in weights(model).items() if not torch.equal(weight, before[name])}
    maps = {name for name in before if ".dofla." in name}
    assert changed == (set() if lora_rank else before.keys() - maps)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [24, 20])
def test_the_loss_is_that_of_the_answers_alone_whatever_the_passes(model, tokenizer, batch_size):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    items = [replace(item, choices=("left", "right left w1")) for item in ITEMS[:batch_size]]
    expected, said = [], []
    for item in items:
        context, answer = (tokenizer.encode(text) for text in STYLES["question"](item)[item.answer])
        logits = model(torch.tensor([context + answer])).logits[0].detach().log_softmax(-1)
        expected += [-float(logits[len(context) - 1 + n, token]) for n, token in enumerate(answer)]
    task = replace(TASK, items=items)
    options = {"learning_rate": 1e-5, "batch_size": batch_size, "epochs": 1}
    finetune(model, tokenizer, task, task, **options, progress=lambda *call: said.append(call))
    assert [(step, steps) for step, steps, _ in said] == [(1, 1)]
    assert float(said[0][2].split()[-1]) == pytest.approx(np.mean(expected), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_seed_decides_everything(tiny, tokenizer, lora_rank):
    def run(seed):
        state, model = torch.get_rng_state(), tiny.gpt2()
        losses = []
        options = {"lora_rank": lora_rank, "progress": lambda *call: losses.append(call[2])}
        finetune(model, tokenizer, TASK, TASK, **ONE, seed=seed, **options)
        assert torch.equal(torch.get_rng_state(), state)
        return losses, weights(model)

    first, again, other = run(3), run(3), run(4)
    assert first[0] == again[0] != other[0]
    assert_close(first[1], again[1], rtol=0, atol=0)


@pytest.mark.slow
def test_bfloat16_is_no_bound_for_small_steps_and_nothing_is_said(tiny, tokenizer, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = tiny.llama().bfloat16()
    before = weights(model)
    finetune(model, tokenizer, TASK, TASK, **ONE | {"learning_rate": 1e-5})
    after = model.model.layers[0].mlp.up_proj.weight
    assert after.dtype == torch.float32
    assert (after != before["model.layers.0.mlp.up_proj.weight"].float()).float().mean() > 0.9
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
    assert score(model, tokenizer, [TASK])[0].items == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0: give a positive number"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"epochs": 0}, "epochs is 0: give 1 or more"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": 1e30}, "lower learning_rate"),
    ],
)
def test_bad_input_is_one_line(tiny, tokenizer, options, message):
    with pytest.raises(DoflaError, match=message):
        finetune(tiny.llama(), tokenizer, TASK, TASK, **ONE | options)


GPT2, PYTHIA = GPT2Config(), GPTNeoXConfig(hidden_size=2048, num_hidden_layers=16)


@pytest.mark.parametrize(
    ("config", "task", "lora", "settings"),
    [
        (GPT2, "piqa", False, (1e-4, 128, 3)),
        (GPT2, "piqa", True, (1e-3, 128, 3)),
        (GPT2, "winogrande", False, (5e-4, 128, 3)),
        (GPT2, "mmlu", False, (1e-6, 64, 1)),
        (PYTHIA, "arc_easy", False, (5e-5, 32, 3)),
        (PYTHIA, "wsc273", False, (5e-5, 64, 3)),
        (GPT2, "mine", False, (1e-5, 16, 3)),
        (GPT2Config(n_layer=24), "piqa", False, (1e-5, 16, 3)),
        (LlamaConfig(), "mmlu", True, (1e-3, 16, 1)),
    ],
)
def test_settings_are_the_papers_for_its_models_and_tasks(config, task, lora, settings):
    model = type("Model", (), {"config": config})
    found = settings_for(model, task, lora)
    assert tuple(found.values()) == pytest.approx(settings)
    assert found.keys() == {"learning_rate", "batch_size", "epochs"}
    model.config = GPT2
    assert all(settings_for(model, known)["batch_size"] > 16 for known in KNOWN)
