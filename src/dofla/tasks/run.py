"""A converted model and its original on tasks, local or the harness's."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import original
from dofla.integration.wrapped import takes_model
from dofla.tasks.harness import language_model, load_tasks, scores_of
from dofla.tasks.items import Task
from dofla.tasks.reading import ENDINGS, load_task
from dofla.tasks.results import TaskResults, compare
from dofla.tasks.ruler import GROUP, TASKS, ruler_tasks
from dofla.tasks.scores import TaskScores


@takes_model("tasks")
def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | Task],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    include_path: str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    context_length: int = 4096,
    haystack: str | Path = "sample",
    progress: Callable[[int, int, str], None] | bool = True,
) -> TaskResults:
    """Compare a converted model with the softmax model it was on tasks: multiple choice, generation, or whatever
    lm-evaluation-harness has. ``print`` shows the figures as a table, ``to_dict()`` is for JSON.

    Args:
        model: a converted model; it is its own original.
        tasks: tasks, names of JSONL files, or names lm-evaluation-harness knows.
        limit: items per task: drawn at random from a local task, the first of one of the harness.
        batch_size: choices or prompts per forward pass.
        seed: of the items drawn, and of RULER's contexts.
        include_path: folder of further tasks of the harness, each a YAML file.
        metadata: for tasks of the harness that make their items.
        context_length: tokens of a context of RULER, with question and answer: ``ruler`` is 11 tasks and their mean.
        haystack: source of the text that stands in them where RULER's essays would; ``sample`` comes with dofla.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (done, total, model) requests.

    Raises:
        DoflaError: for a bad limit, two tasks of one name, and what loading, scoring, the model or the harness refuse.
    """
    if limit is not None and limit < 1:
        raise DoflaError(f"limit {limit}: give 1 item per task or more")
    wanted = [load_task(task) if isinstance(task, str) and task.endswith(ENDINGS) else task for task in tasks]
    wanted = [task if isinstance(task, str) else task.take(limit, seed=seed) for task in wanted]
    names = [task if isinstance(task, str) else task.name for task in wanted]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DoflaError(f"task {twice[0]!r} is given twice: tasks are told apart by their names")
    streams = sys.stdout, sys.stderr  # which the harness does not get
    ruler = [task for task in wanted if isinstance(task, str) and task in (GROUP, *TASKS)]
    loaded = load_tasks([task for task in wanted if task not in ruler], include_path, metadata)
    if ruler:
        if (most := positions_of(model)) is not None and context_length > most:
            raise DoflaError(f"context_length is {context_length}: the model has {most} positions, give no more")
        for kind, entries in ruler_tasks(ruler, tokenizer, context_length, haystack, limit, seed).items():
            loaded[kind] |= entries

    def measured(who: str) -> list[TaskScores]:
        def report(done: int, total: int) -> None:
            if callable(progress):
                with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                    progress(done, total, who)

        return scores_of(language_model(model, tokenizer, batch_size, report), loaded, limit)

    with evaluation_mode(model):
        with original(model):
            before = measured("original")
        pairs = zip(before, measured("compressed"), strict=True)
        contexts = f"Contexts of {context_length:,} tokens, {haystack} in place of RULER's essays" if ruler else None
        return TaskResults([compare(*pair) for pair in pairs], limit, contexts)


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], *, batch_size: int = 16
) -> list[TaskScores]:
    """Scores of a causal language model on local tasks as it stands, softmax or linear; for a converted model's
    original call this within ``dofla.original(model)``."""
    with evaluation_mode(model):
        return scores_of(language_model(model, tokenizer, batch_size), load_tasks(tasks))
