"""Looking things up: what a memory finds again of single facts in a long context, by generation: dofla's, the
original's, what one would use instead.

    python benchmarks/peers/lookups.py --model models/smollm2-135m --calibrate data/english-train.txt.gz \\
        --text data/books-val.txt.gz --out runs/lookups --kvpress build/peers/bin/python

Kinds of question are those of RULER (needles.py): *single*, a needle among sentences about nothing; *multi-key*, one
of four needles in prose (``--text``); *variables*, four assignments that lead from one variable to the next; *common
words* of a list. A score is the share of what was asked for that stands in what the model writes, greedily; a mean over
questions with an interval of 95 % by bootstrap over contexts.

Of each kind the template is taken that the original does best with, at the shortest length, on contexts of their own,
among those of ``--template``, if some are named; what it scores less than ``--least`` with is left out, since nothing
can be lost there. What is measured stays in the folder and is not measured again. With ``--retrieval-heads`` there is
one more memory, some of whose KV heads hold every token of ``--context``. ``--student NAME=FOLDER``, adapters of the
same model, are asked instead of models that are compressed here. ``--kvpress`` is the Python of an environment with
``benchmarks/peers/requirements.txt``, where press_lookups.py is run; transformers' quantized caches are among the rows
where optimum-quanto is installed.
"""

from __future__ import annotations

import copy
import math
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from continuation import CODED, OURS, SIZES, coded_bytes, limit_of, nearest_limit, saved, students
from judging import SOFTMAX, filled, token_bytes
from needles import KINDS, Writer
from questions import Context, Found, Task, read_found, write, write_tasks
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, QuantizedCache

import dofla
from dofla.data import TokenWindows
from dofla.display import size, table
from dofla.errors import DoflaError
from dofla.evaluation.language import bootstrap_interval
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode
from dofla.runs.opening import open_original
from dofla.serving.prompt_state import read_prompt

CHOOSING, ASKING = 1, 0
"""Seeds: of the contexts that choose templates, and of those that are judged."""
TRIED = "original, to choose a template"
"""What the former's rows are called, which are not in the table."""


def cell(found: Found) -> str:
    """Its mean, and an interval of 95 % by bootstrap over contexts."""
    sums, counts = (torch.tensor([f(x) for x in found.scores], dtype=torch.float64) for f in (sum, len))
    low, high = bootstrap_interval(sums, counts)
    return f"{found.mean:.2f} ({low:.2f} to {high:.2f})"


Answer = Callable[[Context], tuple[list[float], int]]
"""The score of each question, and the bytes of the memory after the context."""


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context) -> tuple[list[float], int]:
    """By the cache that the model comes with."""
    with evaluation_mode(model):
        cache = read_prompt(model, torch.tensor([context.ids]))
        scores = _scores(model, tokenizer, context, lambda: copy.deepcopy(cache))
    return scores, cache_bytes(cache)


@torch.no_grad()
def answer_coded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bits: int, context: Context
) -> tuple[list[float], int]:
    """By transformers' QuantizedCache, which has coded the whole context."""
    cache = DynamicCache(config=model.config)
    model.base_model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: cache})
    pairs = [(layer.keys, layer.values) for layer in cache.layers]

    def coded() -> Cache:
        return filled(pairs, QuantizedCache("quanto", model.config, nbits=bits))

    return _scores(model, tokenizer, context, coded), coded_bytes(coded())


def _scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context, remembered: Callable[[], Cache]
) -> list[float]:
    written = [write(model, remembered(), x.ids, len(context.ids), x.room) for x in context.questions]
    return [x.score(tokenizer.decode(ids)) for x, ids in zip(context.questions, written, strict=True)]


def ask(folder: Path, memory: str, limit: int, answer: Answer, task: Task) -> Found:
    """Measured now, or found before."""
    if found := read_found(folder, task).get((memory, limit)):
        return found
    answered = [answer(context) for context in task.contexts]
    most = max(held for _, held in answered)
    found = Found(memory, limit, task.kind, task.template, task.length, most, [scores for scores, _ in answered])
    found.write(folder)
    return found


def merged(folder: Path, tasks: list[Task]) -> Table:
    """A row of each memory in the folder, by the bytes it may take and then by what it finds; a column of each task."""
    columns = [read_found(folder, task) for task in tasks]
    count = [sum(len(context.questions) for context in task.contexts) for task in tasks]
    heads = [f"{task.kind}, {task.length} ({asked})" for task, asked in zip(tasks, count, strict=True)]
    shown = table("memory", "at most", *heads)
    rows = {row: [column.get(row) for column in columns] for column in columns for row in column}
    rows.pop((TRIED, 0), None)
    for memory, limit in sorted(rows, key=lambda row: (row[1], -sum(x.mean for x in rows[row] if x))):
        own = rows[memory, limit]
        shown.add_row(memory, size(max(x.bytes for x in own if x)), *(cell(x) if x else "" for x in own))
    return shown


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[Path, typer.Option(help="Text to measure directions on.")],
    text: Annotated[Path, typer.Option(help="Prose to hide needles in.")],
    out: Annotated[Path, typer.Option(help="Folder of what is found.")],
    kind: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; repeatable; default all.")] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="To choose of, in kinds that have it; repeatable; default all.")
    ] = None,
    cache: Annotated[list[str] | None, typer.Option(help="Sizes; repeatable; default 1.5MiB, 5.8MiB.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable; default 1024 and 2048.")] = None,
    questions: Annotated[int, typer.Option(help="Of each kind and length, at least.")] = 50,
    choosing: Annotated[int, typer.Option(help="Contexts that choose among templates.")] = 6,
    least: Annotated[float, typer.Option(help="Score of the original with which a kind is worth asking.")] = 0.3,
    context: Annotated[int | None, typer.Option(help="Positions that memories are for; default all there are.")] = None,
    retrieval_heads: Annotated[int, typer.Option(help="KV heads that hold every token, in one more memory.")] = 0,
    student: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter, instead of compressing; repeatable.")
    ] = None,
    kvpress: Annotated[Path | None, typer.Option(help="Python of an environment with kvpress.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default the checkpoint's, where that is not slow.")] = None,
) -> None:
    kinds, lengths = kind or list(KINDS), length or [1024, 2048]
    if unknown := set(kinds) - KINDS.keys():
        raise typer.BadParameter(f"no kind is called {min(unknown)!r}: choose of {', '.join(KINDS)}")
    templates = {each: [name for name in KINDS[each][1] if name in (template or KINDS[each][1])] for each in kinds}
    if template and (lacking := [each for each, own in templates.items() if not own]):
        of = "; ".join(f"{each}: {', '.join(KINDS[each][1])}" for each in lacking)
        raise typer.BadParameter(f"no template left for {', '.join(lacking)}: choose of {of}")
    if min(questions, choosing) < 1:
        raise DoflaError(f"questions: {questions}, choosing: {choosing}; give 1 at least of each")
    adapters = saved(student or [])
    if adapters and retrieval_heads:
        raise typer.BadParameter(f"--retrieval-heads {retrieval_heads}: compress with them, or leave --student out")
    teacher, tokenizer = open_original(model, dtype)
    if (most := positions_of(teacher)) is not None and max(lengths) > most:
        raise DoflaError(f"length {max(lengths)}: {model} has {most} positions, give no more")
    known = dofla.token_windows(calibrate, tokenizer, length=512, windows=12)
    writer, tasks = Writer(tokenizer, all_tokens(text, tokenizer)), []
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=220)
    # A model is asked in the attention it has; the original's is that of a student whose layers are all softmax.
    dofla.linear.linearize(teacher, budget=16)
    with dofla.original(teacher):

        def original(context: Context) -> tuple[list[float], int]:
            return answer(teacher, tokenizer, context)[0], len(context.ids) * token_bytes(teacher)

        for each in kinds:
            trials = [writer.task(each, template, min(lengths), choosing, CHOOSING) for template in templates[each]]
            tried = {trial.template: ask(out, TRIED, 0, original, trial).mean for trial in trials}
            best = max(tried, key=tried.__getitem__)
            console.print(f"{each}: the original scores {', '.join(f'{x:.2f} ({name})' for name, x in tried.items())}")
            if tried[best] >= least:
                contexts = math.ceil(questions / len(trials[0].contexts[0].questions))
                tasks += [writer.task(each, best, n, contexts, ASKING) for n in lengths]
        for task in tasks:
            ask(out, SOFTMAX, 0, original, task)
    dofla.restore(teacher)
    if not tasks:
        raise DoflaError(f"the original scores below {least} on every kind: give a smaller --least or a larger model")
    limits = {each: limit_of(teacher, each, context) for each in cache or SIZES}
    write_tasks(out, tasks, list(limits.values()))
    for name, bits in CODED.items():
        for task in tasks:
            ask(out, name, 0, partial(answer_coded, teacher, tokenizer, bits), task)
    for name, folder in adapters.items():
        if any(name not in {memory for memory, _ in read_found(out, task)} for task in tasks):
            adapter = dofla.load(folder, base_model=model, dtype=teacher.dtype)
            limit = nearest_limit(adapter, limits.values())
            for task in tasks:
                ask(out, name, limit, partial(answer, adapter, tokenizer), task)
    for each, limit in () if adapters else limits.items():
        made = students(each, known, None, context)
        if retrieval_heads:
            options = {"size": each, "context": context, "tokenizer": tokenizer}
            made[f"{OURS}, {retrieval_heads} retrieval heads"] = partial(
                dofla.compress, windows=known, retrieval_heads=retrieval_heads, **options
            )
        for name, make in made.items():
            memory = name if context is None else f"{name}, context {context}"
            if any((memory, limit) not in read_found(out, task) for task in tasks):
                student = make(teacher)
                for task in tasks:
                    ask(out, memory, limit, partial(answer, student, tokenizer), task)
                dofla.restore(teacher)
    if kvpress:
        subprocess.run([kvpress, Path(__file__).parent / "press_lookups.py", "--model", model, out], check=True)
    console.print(merged(out, tasks))


def all_tokens(text: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Of a text, in their order."""
    windows: TokenWindows = dofla.token_windows(text, tokenizer, length=512, split="all")
    return windows.input_ids.flatten().tolist()


if __name__ == "__main__":
    typer.run(main)
