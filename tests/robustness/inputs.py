"""One of everything that dofla reads, and how it is read."""

import gzip
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file
from word_tokenizers import WORDS, word_tokenizer

import dofla
from dofla.distillation import distill
from dofla.integration.checkpoint import ADAPTER, LORA, WEIGHTS, feature_map_tensors
from dofla.integration.converted import Converted
from dofla.integration.record import RECORD
from dofla.plans.curves import Curves
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.report import write_report
from dofla.runs.opening import load_tokenizer, open_original
from dofla.runs.recipe import Recipe
from dofla.runs.run import run
from dofla.storage.files import write_json
from dofla.tasks.reading import load_task

LENGTH = 16
DISTILL = {"steps": 2, "batch_size": 2, "rows": 8}
END_TO_END = {"steps": 1, "batch_size": 2, "lora_rank": 2}
RECIPE = """
model: {model}
budget: 8
seeds: [0]
data: {{source: {text}, length: 16, windows: 8}}
validation: {{source: {text}, length: 16, windows: 4, split: all}}
profile: {{samples: 16, windows: 4}}
students:
  - {{name: Fix, strategy: fixed, trained: false}}
  - {{name: Even, strategy: hybrid}}
distill: {{steps: 2, batch_size: 2, rows: 8, checkpoint_every: 1, learning_rates: {{}}}}
evaluate: {{fidelity_windows: 2}}
"""


def make(folder: Path, tiny: Any) -> None:
    """Write all of it into a folder."""
    tokenizer = word_tokenizer(bos_token="<end>", eos_token="<end>")
    for name, model in (("model", tiny.llama()), ("short", tiny.gpt2(n_positions=LENGTH - 1))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    chance = random.Random(0)
    documents = [" ".join(chance.choices(WORDS, k=20)) for _ in range(150)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "text.txt.gz").write_bytes(gzip.compress("\n\n".join(documents).encode()))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), folder / "text.parquet")
    save_file({"input_ids": tiny.tokens(8, LENGTH)}, folder / "tokens.safetensors")
    save_file({"input_ids": tiny.tokens(8, LENGTH) + 1}, folder / "foreign.safetensors")  # one token is not the model's
    items = [{"question": f"w{n}", "choices": ["w1", "w2"], "answer": n % 2, "context": "w3"} for n in range(8)]
    (folder / "quiz.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder / "recipe.yaml").write_text(RECIPE.format(model=folder / "model", text=folder / "text.txt"))

    model, _ = open_original(str(folder / "model"))
    windows = dofla.TokenWindows.of(tiny.tokens(8, LENGTH))
    profile = dofla.linear.profile(model, windows, samples=16)
    profile.save(folder / "profile")
    sizes = {"steps": 1, "held_out": 2, "rows": 8}
    dofla.linear.measure_curves(model, windows, 8, **sizes).save(folder / "curves.json")
    dofla.calibrate(model, windows).save(folder / "calibration.safetensors")
    plan = dofla.linear.allocate(profile, 8, "hybrid")
    plan.save(folder / "plan.json")
    dofla.linear.linearize(model, plan)
    distill(model, windows, folder=folder / "distilled", **DISTILL)
    dofla.linear.distill_end_to_end(model, windows, folder=folder / "finished", **END_TO_END)
    figures = dofla.evaluate(model, windows)
    write_json(folder / "figures.json", figures.to_dict())
    dofla.note(model, figures=figures)
    dofla.save_adapter(model, folder / "adapter")
    model.save_pretrained(folder / "standalone")
    document = torch.arange(1, 11).unsqueeze(0)
    dofla.serving.save_state(
        dofla.serving.read_prompt(model, document), document, folder / "document.safetensors", model
    )
    recipe = Recipe.load(folder / "recipe.yaml", ["students=[{name: Even, strategy: hybrid}]"])
    run(recipe, folder / "run")


@dataclass(frozen=True)
class Reader:
    """How one kind of input is read.

    Attributes:
        read: of the folder with all inputs; returns what was found, to be compared.
        files: that it reads.
        checked: those of them of which every change is noticed that changes what is found.
    """

    read: Callable[[Path], Any]
    files: tuple[str, ...]
    checked: tuple[str, ...] = ()


def _numbers(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _student(folder: Path) -> Any:
    model = dofla.load(folder)
    plan, record = Converted.of(model).plan.to_dict()["layers"], Converted.of(model).record.to_dict()
    return model, plan, record, _numbers(feature_map_tensors(model))


def _adapter(folder: Path) -> Any:
    model, plan, _, maps = _student(folder / "adapter")
    with torch.no_grad():
        return plan, maps, model(input_ids=torch.arange(1, 9).unsqueeze(0)).logits.tolist()


def _teacher(folder: Path) -> None:
    model, tokenizer = open_original(str(folder / "model"))
    linear = dofla.linear.linearize(model, budget=8)
    windows = dofla.token_windows(str(folder / "text.txt"), tokenizer, length=LENGTH, windows=2, split="all")
    dofla.evaluate(linear, windows)


def _profile(folder: Path) -> Any:
    profile = Profile.load(folder / "profile")
    for strategy in ("fixed", "dof", "hybrid"):
        dofla.linear.allocate(profile, 8, strategy)
    return profile.to_dict()


def _curves(folder: Path) -> Any:
    curves = Curves.load(folder / "curves.json")
    with suppress(dofla.DoflaError):  # they are curves, but not for this profile
        dofla.linear.allocate(Profile.load(folder / "profile"), 8, "measured", curves=curves)
    return curves


def _calibration(folder: Path) -> Any:
    found = dofla.Calibration.load(folder / "calibration.safetensors")
    model, _ = open_original(str(folder / "model"))
    dofla.compress(model, size="8KiB", calibration=found)
    return found.shares, found.made_by


def _prompt_state(folder: Path) -> Any:
    ids, cache = dofla.serving.load_state(folder / "document.safetensors", dofla.load(folder / "adapter"))
    states = [state for entry in cache.layers for state in entry.states]
    return ids.tolist(), repr(states)


def _training(train: Callable, place: str, options: dict[str, int]) -> Callable[[Path], Any]:
    """Training that goes on in a folder."""

    def read(folder: Path) -> Any:
        model, _ = open_original(str(folder / "model"))
        dofla.linear.linearize(model, Plan.load(folder / "plan.json"))
        windows = dofla.TokenWindows.of(load_file(folder / "tokens.safetensors"))
        history = train(model, windows, folder=folder / place, **options)
        return history.losses.tolist(), _numbers(feature_map_tensors(model))

    return read


_opened = cache(dofla.load)


def _figures(folder: Path) -> Any:
    student = _opened(folder / "adapter")
    dofla.note(student, figures=folder / "figures.json")
    return Converted.of(student).record.to_dict()


def _text(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        windows = dofla.token_windows(str(folder / name), load_tokenizer(folder / "model"), length=LENGTH, split="all")
        return windows.input_ids.tolist()

    return read


def _task(folder: Path) -> Any:
    items, tokenizer = load_task(folder / "quiz.jsonl").items, load_tokenizer(folder / "model")
    return items, [tokenizer([item.question, *item.choices])["input_ids"] for item in items]


STANDALONE = ("standalone/model.safetensors", "standalone/config.json")
ADAPTERS = tuple(f"adapter/{name}" for name in (WEIGHTS, LORA, "plan.json"))
READERS: dict[str, Reader] = {
    "recipe": Reader(lambda folder: Recipe.load(folder / "recipe.yaml").to_dict(), ("recipe.yaml",)),
    "plan": Reader(lambda folder: Plan.load(folder / "plan.json").to_dict(), ("plan.json",)),
    "profile": Reader(_profile, ("profile/profile.json", "profile/spectra.safetensors")),
    "curves": Reader(_curves, ("curves.json",)),
    "calibration": Reader(_calibration, ("calibration.safetensors",)),
    "adapter": Reader(_adapter, (*ADAPTERS, f"adapter/{ADAPTER}", f"adapter/{RECORD}"), checked=ADAPTERS),
    "standalone": Reader(lambda folder: _student(folder / "standalone")[1:], STANDALONE, checked=STANDALONE),
    "teacher": Reader(_teacher, ("model/config.json", "model/model.safetensors", "model/tokenizer_config.json")),
    "prompt state": Reader(_prompt_state, ("document.safetensors",)),
    "distillation": Reader(_training(distill, "distilled", DISTILL), ("distilled/distill.safetensors",)),
    "end-to-end distillation": Reader(
        _training(dofla.linear.distill_end_to_end, "finished", END_TO_END), ("finished/distill.safetensors",)
    ),
    "figures": Reader(_figures, ("figures.json",)),
    "report": Reader(
        lambda folder: write_report([folder / "run"], folder / "page.html").read_text(),
        ("run/models/even-seed0/evaluation.json", "run/recipe.yaml", "run/run.json", "run/models/even-seed0/plan.json"),
    ),
    "text": Reader(_text("text.txt"), ("text.txt",)),
    "gzipped text": Reader(_text("text.txt.gz"), ("text.txt.gz",)),
    "JSON lines": Reader(_text("text.jsonl"), ("text.jsonl",)),
    "Parquet": Reader(_text("text.parquet"), ("text.parquet",)),
    "tokens": Reader(_text("tokens.safetensors"), ("tokens.safetensors",)),
    "task": Reader(_task, ("quiz.jsonl",)),
    "tokenizer": Reader(lambda folder: load_tokenizer(folder / "model").encode("w1 w2"), ("model/tokenizer.json",)),
}
