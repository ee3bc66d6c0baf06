"""A student and its teacher on a list of tasks, local or the harness's: one result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.display import reports_progress
from dofla.errors import DoflaError
from dofla.integration.surgery import softmax
from dofla.tasks.compare import Pair, compare, win_and_tie
from dofla.tasks.harness import run_harness
from dofla.tasks.items import Task
from dofla.tasks.reading import load_task
from dofla.tasks.results import TaskResults
from dofla.tasks.scores import METRICS
from dofla.tasks.scoring import score

_FILES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


@reports_progress("tasks")
def evaluate_tasks(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | Task],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | bool = True,
) -> TaskResults:
    """Compare a student with the softmax model it was on multiple-choice tasks.

    Args:
        student: a linearized model; it is its own teacher.
        tasks: tasks, names of JSONL files, or names lm-evaluation-harness knows.
        limit: items per task: drawn at random from a local task, the first of one of the harness.
        batch_size: choices per forward pass.
        seed: of the items drawn and of the bootstrap.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (done, total, task) items of the local tasks, teacher's and student's.

    Returns:
        Figures that are fields; ``print`` shows them as tables, ``to_dict()`` is for JSON.

    Raises:
        DoflaError: for a bad limit, two tasks of one name, and what loading, scoring or the harness refuse.
    """
    if limit is not None and limit < 1:
        raise DoflaError(f"limit {limit}: give 1 item per task or more")
    wanted = [_task(task, limit, seed) for task in tasks]
    names = [task if isinstance(task, str) else task.name for task in wanted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DoflaError(f"task {twice[0]!r} is given twice: tasks are told apart by their names")
    pairs = _scored(student, tokenizer, [task for task in wanted if isinstance(task, Task)], batch_size, progress)
    if asked := [task for task in wanted if isinstance(task, str)]:
        found = run_harness(student, tokenizer, asked, limit=limit, batch_size=batch_size)
        pairs |= {pair.student.task: pair for pair in found}
    # As they were asked for; the harness's groups, which have become their tasks, last.
    ordered = [pairs[name] for name in [*names, *(name for name in pairs if name not in names)] if name in pairs]
    return TaskResults(
        tasks=[compare(pair.teacher, pair.student, seed=seed) for pair in ordered],
        win_and_tie={metric: win_and_tie(ordered, metric, seed=seed) for metric in METRICS},
        limit=limit,
    )


def _task(task: str | Task, limit: int | None, seed: int) -> str | Task:
    """Local tasks with the items wanted; a name of the harness as it is."""
    if isinstance(task, str):
        if not task.endswith(_FILES):
            return task
        task = load_task(task)
    return task.take(limit, seed=seed)


def _scored(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    batch_size: int,
    progress: Callable[[int, int, str], None] | bool,
) -> dict[str, Pair]:
    total, before = 2 * sum(len(task.items) for task in tasks), 0
    pairs: dict[str, Pair] = {}
    for task in tasks:

        def report(done: int, _: int, task: Task = task) -> None:
            if callable(progress):
                progress(before + done, total, task.name)  # noqa: B023 - called before the next round

        with softmax(student):
            teacher = score(student, tokenizer, task, batch_size=batch_size, progress=report)
        before += len(task.items)
        pairs[task.name] = Pair(teacher, score(student, tokenizer, task, batch_size=batch_size, progress=report))
        before += len(task.items)
    return pairs
