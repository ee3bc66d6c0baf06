"""lm-evaluation-harness on a model in memory: its tasks, and local ones put into its form."""

import copy
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError, first_line
from dofla.integration.interface import token_by_token
from dofla.integration.positions import positions_of
from dofla.storage.extras import extra
from dofla.tasks.items import Task
from dofla.tasks.scores import Metric, TaskScores, standard_error
from dofla.tasks.styles import STYLES

_PART = 256  # requests between two reports of progress; of like length they share a forward pass
_BOOTSTRAP = 1000  # draws, for the standard error of metrics that are no mean
_SHOTS_SEED = 1234  # the harness's own, of the examples in a prompt

Progress = Callable[[int, int], None]


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block the harness prints, logs and shows nothing, and starts no processes."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # which would share out the draws for a standard error
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


@quiet()
def harness_task(task: Task) -> Any:
    """A task of the harness (``lm_eval.api.task.ConfigurableTask``) that asks what a local one does.

    Prompts are written out, so that no template stands between the two. ``lm_eval.simple_evaluate`` takes it among its
    ``tasks``.
    """
    blank, rows = task.style == "blank", []
    for item in task.items:
        contexts, endings = zip(*STYLES[task.style](item), strict=True)
        # Of several contexts with one continuation the harness takes the right one's index for the text.
        text = {"choices": list(contexts), "rest": endings[0][1:]}
        if not blank:
            text = {"text": contexts[0] if contexts[0].strip() else "", "choices": [ending[1:] for ending in endings]}
        rows.append({"gold": item.answer, **text})
    data = {"test": lm_eval("datasets").Dataset.from_list(rows)}
    # It divides by the length of a context, if that is what is chosen: only plain accuracy means anything then.
    metrics = ["acc"] if blank else ["acc", "acc_norm"]
    config = {
        "task": task.name,
        "custom_dataset": lambda **_: data,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "gold" if blank else "text",
        "doc_to_choice": "choices",
        "doc_to_target": "rest" if blank else "gold",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
    }
    return lm_eval("lm_eval.api.task").ConfigurableTask(config=config)


@quiet()
def load_tasks(
    tasks: Sequence[str | Task], include_path: str | Path | None = None, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Tasks for ``lm_eval.evaluator.evaluate``: local ones, and those of the harness by name, with their groups;
    DoflaError if lm-eval is not installed, or has no such task, or cannot load it."""
    found: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    names = [task for task in tasks if isinstance(task, str)]
    options = {"include_path": include_path and str(include_path), "metadata": dict(metadata or {})}
    manager = lm_eval("lm_eval.tasks").TaskManager(include_defaults=False, **options)
    if any(name not in manager.task_index for name in names):  # its own are ten thousand, and take seconds to list
        manager = lm_eval("lm_eval.tasks").TaskManager(**options)
    for task in tasks:
        loaded = _named(manager, task) if isinstance(task, str) else {"tasks": {task.name: harness_task(task)}}
        for kind, entries in loaded.items():
            found[kind] |= entries
    return found


def _named(manager: Any, name: str) -> dict[str, Any]:
    if name not in manager.task_index:
        raise DoflaError(f"lm-evaluation-harness has no task {name!r}: see lm_eval ls tasks, or give a JSONL file")
    try:
        return manager.load([name])
    except Exception as error:  # whatever its datasets raise: no network, no such file, no permission, ...
        what = f"task {name!r} cannot be loaded ({first_line(error)})"
        raise DoflaError(f"{what}: without the hub, give a JSONL file: --tasks {name}.jsonl") from error


@quiet()
def language_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, progress: Progress | None = None
) -> Any:
    """The harness's HFLM of a model, which it puts into evaluation mode; its tokenizer is a copy that can pad."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise DoflaError(f"{type(model).__name__} cannot do tasks: give a causal language model")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise DoflaError("the tokenizer has no bos or eos token to start an empty question from: set one")
    hflm = lm_eval("lm_eval.models.huggingface").HFLM
    options = {"batch_size": batch_size, "max_length": positions_of(model), "softmax_dtype": "float32"}
    lm = hflm(pretrained=model, backend="causal", tokenizer=copy.deepcopy(tokenizer), **options)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, kind, partial(_answers, lm, getattr(lm, kind), progress))
    return lm


def _answers(lm: Any, run: Callable[..., list[Any]], progress: Progress | None, requests: Sequence[Any]) -> list[Any]:
    """Answers of ``run``, a method of the harness's model, to its requests."""
    found: list[Any] = []
    for begin in range(0, len(requests), _PART):
        part = requests[begin : begin + _PART]
        chooses = part[0].request_type == "loglikelihood"
        for request in part if chooses else ():
            context, choice, *_ = request.args
            length = len(lm.tok_encode(context + choice)) - len(lm.tok_encode(context.rstrip()))
            if not 0 < length <= lm.max_length:
                what = f"the choice {choice[:40]!r} has {length} tokens of its own"
                raise DoflaError(f"task {request.task_name}: {what}: give one of 1 to {lm.max_length}")
        # A likelihood is that of decoding the text: read at once, its end would still see all of it.
        with nullcontext() if part[0].request_type == "generate_until" else token_by_token():
            answers = run(part, disable_tqdm=True)
        if chooses and not all(math.isfinite(value) for value, _ in answers):
            what = "a log-likelihood is NaN or infinite: check the model's dtype and its feature maps"
            raise DoflaError(f"task {part[0].task_name}: {what}")
        found += answers
        if progress:
            progress(len(found), len(requests))
    return found


@quiet()
def scores_of(lm: Any, tasks: Mapping[str, Any], limit: int | None = None) -> list[TaskScores]:
    """Scores of a model (:func:`language_model`) on tasks and on groups of them (:func:`load_tasks`), with as many
    examples in a prompt as each says; of the first ``limit`` items of each task.

    Raises:
        DoflaError: a choice has no tokens, or more than the model reads; a likelihood is not finite; what the harness
            refuses, such as answers longer than the model.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(_SHOTS_SEED)
    options = {"limit": limit, "bootstrap_iters": _BOOTSTRAP, "log_samples": True}
    try:
        found = lm_eval("lm_eval.evaluator").evaluate(lm, task_dict=tasks, **options)
    except DoflaError:
        raise
    except (AssertionError, ValueError) as error:
        raise DoflaError(f"lm-evaluation-harness, tasks {', '.join(tasks['tasks'])}: {error}") from error
    scores = (_scores(name, row, found["samples"], tasks) for name, row in found["results"].items())
    return [each for each in scores if each.metrics]


def _scores(name: str, row: Mapping[str, Any], all_samples: Mapping[str, Any], tasks: Mapping[str, Any]) -> TaskScores:
    group = tasks["groups"].get(name)
    members = [name] if group is None else [task.task_name for task in group.get_all_tasks()]
    samples = [sample for member in members for sample in all_samples[member]]
    metrics, logprobs = {}, []
    for key, value in row.items():
        metric, _, kind = key.rpartition(",")  # what is kept of an answer: a task may have several such filters
        if metric and not metric.endswith("_stderr"):
            values = [sample.get(metric) for sample in samples if sample["filter"] == kind]
            numbers = [float(x) for x in values if isinstance(x, Real)]
            if not numbers or len(numbers) < len(values) or not math.isclose(fmean(numbers), value, abs_tol=1e-9):
                numbers = []  # the metric is no mean over items
            stderr, error = standard_error(numbers), row.get(f"{metric}_stderr,{kind}")
            if stderr is None and isinstance(error, Real):
                stderr = float(error)
            metrics[metric if kind == "none" else f"{metric}, {kind}"] = Metric(float(value), stderr, numbers)
    if all(tasks["tasks"][member].OUTPUT_TYPE == "multiple_choice" for member in members):
        logprobs = [[float(x) for x, _ in sample["filtered_resps"]] for sample in samples]
    return TaskScores(name, row.get("sample_len", 0), metrics, logprobs)


def lm_eval(module: str) -> ModuleType:
    """A module that lm-evaluation-harness brings; DoflaError if that is not installed."""
    return extra(module, "eval", "evaluating on tasks")
