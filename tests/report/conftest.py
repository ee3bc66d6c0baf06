"""A run of a tiny language model and one of a tiny encoder, and a browser to look at their pages with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, sync_playwright
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dofla.report import look, report_on
from dofla.runs.recipe import Recipe
from dofla.runs.run import run

WORDS = [f"w{n}" for n in range(60)]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = {
    "budget": 12,
    "profile": {"samples": 32, "windows": 4},
    "curves": {"windows": 8, "steps": 2, "batch_size": 2, "rows": 8, "held_out": 2},
    "distill": {"steps": 3, "rows": 8, "batch_size": 2},
    "evaluate": {"batch_size": 2, "fidelity_windows": 2},
}


@pytest.fixture(scope="session", autouse=True)
def all_are_looked_at() -> Iterator[None]:
    """However many students a run has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "MOST", 8)
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium of the system; tests that need it are skipped where there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=[*quiet, "--disable-extensions"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def home(tiny, tmp_path_factory) -> Path:
    """A folder with text, ``llama`` and ``bert``, and their tokenizer."""
    folder = tmp_path_factory.mktemp("report")
    vocabulary = {word: n for n, word in enumerate(["<end>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>", pad_token="<end>")
    for name in ("llama", "bert"):
        getattr(tiny, name)().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(60, (80,), generator=generator)) for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    return folder


@pytest.fixture(scope="session")
def llama_run(home) -> Path:
    """The folder of a run with five students, one of them with a layer kept softmax, one without features."""
    students = [
        {"name": "Performer", "strategy": "fixed", "trained": False},
        {"name": "DoF", "strategy": "dof", "window": 4, "sinks": 1},
        {"name": "Measured"},
        {"name": "Compressed", "strategy": "compressed", "trained": False, "budget": 6},
        {"name": "One softmax", "strategy": "hybrid", "keep_softmax": ["model.layers.0.self_attn"]},
    ]
    data = {"source": str(home / "text.txt"), "length": 64, "windows": 12}
    return made(home, "llama", data, students, [0, 1])


@pytest.fixture(scope="session")
def bert_run(home) -> Path:
    """The folder of an encoder's run."""
    students = [{"name": "DoF", "strategy": "dof"}, {"name": "Even", "strategy": "hybrid"}]
    data = {"source": str(home / "text.txt"), "length": 48, "windows": 12, "padded": True}
    return made(home, "bert", data, students, [0])


def made(home: Path, model: str, data: dict, students: list[dict], seeds: list[int]) -> Path:
    folder = home / f"{model}-run"
    given = {"model": str(home / model), "seeds": seeds, "data": data, "students": students, **SIZES}
    run(
        Recipe.from_dict(given | {"validation": data | {"split": "all"}}), folder, finish=partial(report_on, speed=True)
    )
    return folder
