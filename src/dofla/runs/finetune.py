"""One fine-tuning from files to files."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dofla.integration.record import Training, command_line
from dofla.integration.student import Student, is_linearized
from dofla.integration.surgery import describe
from dofla.runs.teacher import open_model
from dofla.runs.view import View
from dofla.runs.workshop import machine
from dofla.storage.files import new_folder, write_json
from dofla.tasks.finetune.data import train_and_test
from dofla.tasks.finetune.loop import FineTuneResult, finetune
from dofla.tasks.finetune.settings import settings_for

RESULT, MODEL = "result.json", "model"


def run_finetune(
    model: str,
    task: str,
    out: str | Path,
    *,
    test: str | Path | None = None,
    tasks_folder: str | Path | None = None,
    style: str | None = None,
    items: int | None = None,
    test_items: int | None = None,
    changes: dict[str, Any] | None = None,
    base_model: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    view: View | None = None,
    **options: Any,
) -> FineTuneResult:
    """Fine-tune a model, softmax or linear, on a task; writes ``result.json`` and the folder ``model`` into ``out``.

    Args:
        model: a folder or hub name (a student's too, or its adapter's), ``demo``, or ``package:NAME/FOLDER``.
        task, test, tasks_folder, style: see :func:`dofla.tasks.finetune.data.train_and_test`.
        out: a new folder.
        items, test_items: at most so many, drawn at random.
        changes: fields of :class:`dofla.tasks.finetune.Settings`, over those of the paper.
        dtype: to load the model in; default that of the checkpoint.
        seed: of everything random.
        view: where progress goes; silent by default.
        **options: for :func:`dofla.tasks.finetune.finetune`.

    Raises:
        DoflaError: bad input of any kind; nothing is written then.
    """
    view = view or View(quiet=True)
    with new_folder(out) as folder:
        learned, tested, source = train_and_test(task, test, tasks_folder, style=style)
        learned, tested = learned.take(items, seed=seed), tested.take(test_items, seed=seed)
        network, tokenizer = open_model(model, dtype, base_model)
        settings = settings_for(network.config, learned.name, lora=options.get("lora_rank") is not None)
        if changes:
            settings = replace(settings, **changes, source=f"{settings.source}, but {', '.join(changes)}")
        numbers = {key: value for key, value in asdict(settings).items() if key != "source"}
        with view.progress(f"finetune {learned.name}") as progress:
            result = finetune(network, tokenizer, learned, tested, **numbers, **options, seed=seed, progress=progress)
        record = {
            "task": {"name": learned.name, "style": learned.style, "files": source},
            "items": {"train": len(learned.items), "test": len(tested.items)},
            "model": {"path": model, "attention": "linear" if is_linearized(network) else "softmax"},
            "settings": asdict(settings) | options | {"dtype": dtype, "seed": seed},
            "accuracy": result.accuracy,
            **asdict(result),
            "machine": machine() | {name: _version(name) for name in ("accelerate", "peft")},
        }
        record["model"] |= describe(network)
        if is_linearized(network):
            how, text = f"fine-tuned on {learned.name}", f"{len(learned.items)} items"
            command = command_line() or f"dofla.tasks.finetune.run_finetune({model!r}, {task!r}, ...)"
            Student.of(network).record.training.append(Training(how, text, result.steps, command, weights=True))
        network.save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        write_json(folder / RESULT, record)
    return result


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
