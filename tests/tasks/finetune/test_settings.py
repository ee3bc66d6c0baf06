"""The paper's settings, as its appendix prints them."""

import pytest
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

from dofla.tasks import KNOWN
from dofla.tasks.finetune import settings_for

GPT2 = GPT2Config()
PYTHIA = GPTNeoXConfig(hidden_size=2048, num_hidden_layers=16)


@pytest.mark.parametrize(
    ("config", "task", "rate", "batch_size", "epochs", "keep"),
    [
        (GPT2, "piqa", 1e-4, 128, 3, "best"),
        (GPT2, "arc_challenge", 1e-5, 64, 3, "best"),
        (GPT2, "winogrande", 5e-4, 128, 3, "best"),
        (GPT2, "mmlu", 1e-6, 64, 1, "last"),
        (PYTHIA, "arc_easy", 5e-5, 32, 3, "best"),
        (PYTHIA, "mmlu", 5e-6, 32, 1, "last"),
        (PYTHIA, "wsc273", 5e-5, 64, 3, "best"),
    ],
)
def test_the_papers_settings(config, task, rate, batch_size, epochs, keep):
    found = settings_for(config, task)
    assert (found.learning_rate, found.batch_size, found.epochs, found.keep) == (rate, batch_size, epochs, keep)
    assert found.source.startswith("paper")


def test_every_known_task_has_settings_and_others_have_defaults():
    assert all(settings_for(GPT2, task).source == "paper, gpt2" for task in KNOWN)
    assert settings_for(GPT2, "mine").source == "default"
    assert settings_for(GPT2Config(n_layer=24), "piqa").source == "default"
    assert settings_for(LlamaConfig(), "mmlu").epochs == 1


def test_low_rank_training_takes_larger_steps():
    assert settings_for(GPT2, "piqa", lora=True).learning_rate == pytest.approx(1e-3)
    assert settings_for(LlamaConfig(), "piqa", lora=True).learning_rate == 1e-3
