"""Tasks of lm-evaluation-harness: its own, and local ones written down for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import softmax
from dofla.tasks.compare import Pair
from dofla.tasks.items import Task
from dofla.tasks.scores import TaskScores
from dofla.tasks.scoring import language_model, lm_eval, quiet
from dofla.tasks.styles import STYLES, Request


def harness_folder(task: Task, folder: str | Path) -> Path:
    """Write ``NAME.yaml`` and ``NAME.jsonl``, with which the harness asks exactly what :func:`dofla.tasks.score` does.

    The prompts are written out, so that no template stands between the two. ``folder`` is what ``--include_path`` of
    the harness, or ``include`` of :func:`run_harness`, takes; it is made if need be. The YAML names the JSONL by its
    absolute path.

    Returns:
        The YAML file.

    Raises:
        DoflaError: if the task's style changes both context and continuation from choice to choice.
    """
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines, blank = [], task.style == "blank"
    for item in task.items:
        requests = STYLES[task.style](item)
        lines.append(json.dumps({"gold": item.answer, **(_inputs(requests) if blank else _outputs(requests))}))
    data = folder / f"{task.name}.jsonl"
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Of several contexts with one continuation the harness takes the right one's index for the text, and divides by
    # the length of a context: only plain accuracy means anything then.
    metrics = ["acc"] if blank else ["acc", "acc_norm"]
    config = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "gold" if blank else "text",
        "doc_to_choice": "choices",
        "doc_to_target": "continuation" if blank else "gold",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
        "metadata": {"version": 1.0},
    }
    path = folder / f"{task.name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    include: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> list[Pair]:
    """Multiple-choice tasks of the harness, zero-shot as each says itself, for a student and its teacher.

    Args:
        model: a linearized model.
        tasks: names; a group's or a tag's stands for all its tasks.
        include: folder with further tasks, as :func:`harness_folder` writes them.
        limit: items per task, the first ones.
        batch_size: choices per forward pass.

    Returns:
        Per task, in the harness's order, what teacher and student made of the same items.

    Raises:
        DoflaError: if lm-eval is not installed, or a task is unknown, is no multiple-choice task or cannot be loaded.
    """
    names: dict[str, Any] = {}
    # The harness has ten thousand tasks of its own: they are listed only if one of them is wanted.
    own = include is None or any(not (Path(include) / f"{name}.yaml").exists() for name in tasks)
    manager = lm_eval("tasks").TaskManager(include_path=None if include is None else str(include), include_defaults=own)
    for name in tasks:
        names |= _load(manager, name)
    with evaluation_mode(model):
        lm = language_model(model, tokenizer, batch_size)
        with softmax(model):
            teacher = _evaluate(lm, names, limit)
        student = _evaluate(lm, names, limit)
    return [Pair(a, b) for a, b in zip(teacher, student, strict=True)]


def _outputs(requests: Sequence[Request]) -> dict[str, Any]:
    contexts, choices = {request.context for request in requests}, [request.continuation for request in requests]
    if len(contexts) > 1 or not all(choice.startswith(" ") for choice in choices):
        raise DoflaError("the harness asks for choices after one context, parted by a space: this style does not")
    return {"text": contexts.pop(), "choices": [choice[1:] for choice in choices]}


def _inputs(requests: Sequence[Request]) -> dict[str, Any]:
    return {"choices": [request.context for request in requests], "continuation": requests[0].continuation[1:]}


def _load(manager: Any, name: str) -> dict[str, Any]:
    """The tasks ``name`` stands for."""
    if name not in manager.task_index:
        raise DoflaError(f"lm-evaluation-harness has no task {name!r}: see lm_eval ls tasks, or give a local task file")
    try:
        loaded = manager.load([name])["tasks"]
    except Exception as error:  # whatever its datasets raise: no network, no such file, no permission, ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DoflaError(
            f"task {name!r} cannot be loaded ({reason}): without the hub, give a local file: --tasks {name}.jsonl"
        ) from error
    for task in loaded.values():
        if task.OUTPUT_TYPE != "multiple_choice":
            raise DoflaError(
                f"task {task.config.task!r} is {task.OUTPUT_TYPE}: only multiple-choice tasks compare here"
            )
    return loaded


def _evaluate(lm: Any, tasks: dict[str, Any], limit: int | None) -> list[TaskScores]:
    asked = {"tasks": tasks, "groups": {}, "group_map": {}}
    with quiet():
        found = lm_eval("evaluator").evaluate(lm, task_dict=asked, limit=limit, bootstrap_iters=0, log_samples=True)
    return [_scores(name, task, found["samples"][name]) for name, task in tasks.items()]


def _scores(name: str, task: Any, samples: Iterable[dict[str, Any]]) -> TaskScores:
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    answers, lengths = [], []
    for sample in samples:
        choices = task.doc_to_choice(sample["doc"])
        answer = task.doc_to_text(sample["doc"]) if task.multiple_input else task.doc_to_target(sample["doc"])
        answers.append(choices.index(answer) if isinstance(answer, str) else int(answer))
        asked = [Request(*arguments[:2]) for arguments in sample["arguments"]]
        lengths.append([request.characters for request in asked] if task.multiple_input else [*map(len, choices)])
    logprobs = [[float(value) for value, _ in sample["filtered_resps"]] for sample in samples]
    return TaskScores(name, [sample["doc_id"] for sample in samples], answers, logprobs, lengths)
