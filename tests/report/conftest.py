"""Runs of a tiny language model and of a tiny encoder."""

from pathlib import Path

import pytest
import torch
from sizes import size_of
from word_tokenizers import WORDS, word_tokenizer

from dofla.integration.checkpoint import load_model
from dofla.runs.recipe import Recipe, read_yaml
from dofla.runs.run import run

SIZES = {
    "budget": 12,
    "profile": {"samples": 32, "windows": 4},
    "distill": {"steps": 3, "rows": 8, "batch_size": 2},
    "end_to_end": {"steps": 2, "batch_size": 2},
    "evaluate": {"batch_size": 2, "fidelity_windows": 2, "prompts": 1, "prompt_tokens": 8, "new_tokens": 4},
}


@pytest.fixture(scope="session")
def home(tiny, tmp_path_factory) -> Path:
    """A folder with text, ``llama`` and ``bert``, and their tokenizer."""
    folder = tmp_path_factory.mktemp("report")
    tokenizer = word_tokenizer(eos_token="<end>", pad_token="<end>")
    for name in ("llama", "bert"):
        getattr(tiny, name)().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(60, (80,), generator=generator)) for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    return folder


@pytest.fixture(scope="session")
def llama_run(home) -> Path:
    """The folder of a run of two seeds: a model that is not trained, one trained in both ways, and one with a
    softmax layer."""
    students = [
        {"name": "Performer", "strategy": "fixed", "trained": False},
        {"name": "DoF", "strategy": "dof", "window": 4, "sinks": 1, "end_to_end": True},
        {"name": "One softmax", "strategy": "hybrid", "keep_softmax": ["model.layers.0.self_attn"]},
    ]
    return made(home, "llama", {"length": 64}, students, [0, 1])


@pytest.fixture(scope="session")
def bert_run(home) -> Path:
    """The folder of an encoder's run."""
    return made(home, "bert", {"length": 48, "padded": True}, [{"name": "Even", "strategy": "hybrid"}], [0])


def made(home: Path, model: str, data: dict, students: list[dict], seeds: list[int]) -> Path:
    folder, data = home / f"{model}-run", {"source": str(home / "text.txt"), "windows": 12} | data
    given = {"model": str(home / model), "seeds": seeds, "data": data, "students": students, **SIZES}
    run(Recipe.from_dict(given | {"validation": data | {"split": "all"}}), folder)
    return folder


@pytest.fixture(scope="session")
def compressed_run(home, llama_run) -> Path:
    """The folder of a compression of the same model, on the same text."""
    given = read_yaml(llama_run / "recipe.yaml")
    shared = {name: given[name] for name in ("model", "data", "validation", "evaluate")}
    run(Recipe.from_dict({"size": size_of(load_model(home / "llama"), 16), **shared}), home / "compressed-run")
    return home / "compressed-run"
