"""RULER (Hsieh et al. 2024, arXiv 2404.06654): what a memory finds again in a long context, by generation: dofla's, the
original's, what one would use instead.

    python benchmarks/peers/ruler.py --model models/qwen2.5-coder-0.5b --length 4096 --contexts 20 --out runs/ruler \\
        --dofla size=3MiB --dofla size=6MiB,retrieval_heads=10,context=4096 --kvpress build/peers/bin/python

Tasks are 11 of RULER's 13, by the generators of lm-evaluation-harness (``pip install -e ".[ruler]"``) and without a
network: where RULER has essays stands ``--haystack``, by default the text that comes with dofla. All rows see the same
contexts, those of ``--seed``. A context is read before anyone asks, once for all rows whose prompts are exact; the
question follows on it. A score is the share of the answers that stand in what the model writes, greedily, within the
tokens that RULER allows. The mean is that of all tasks, with an interval of 95 % by bootstrap over contexts.

Rows are the softmax cache, transformers' QuantizedCache of 4 bits where optimum-quanto is installed, and one of each
``--dofla``, whatever options of :func:`dofla.compress` it names. With ``--kvpress``, the Python of an environment with
``benchmarks/peers/requirements.txt``, press_ruler.py adds presses of the bytes that each of the latter holds after a
context. What is measured of a context stays in the folder and is not measured again, so that ``--contexts`` may grow.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from continuation import CODED, coded_bytes, options_of
from judging import SOFTMAX, filled, token_bytes
from questions import Context, Found, Known, Task, add_found, measured, read_found, score, write_tasks
from reading import Reading, copied
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, QuantizedCache

import dofla
from dofla.compression.directions import default_cut
from dofla.display import size, table
from dofla.errors import DoflaError
from dofla.evaluation.language import bootstrap_interval
from dofla.integration.cache import cache_bytes
from dofla.integration.positions import positions_of
from dofla.runs.opening import open_original
from dofla.tasks.harness import quiet
from dofla.tasks.ruler import GROUP, TASKS, ruler_tasks

BITS = {SOFTMAX: None} | {name: bits for name, bits in CODED.items() if bits == 4}


@quiet()
def tasks_of(
    tokenizer: PreTrainedTokenizerBase, names: list[str], length: int, contexts: int, haystack: str | Path, seed: int
) -> list[Task]:
    """The prompts of the harness, cut where the question begins."""
    found = []
    for name, task in ruler_tasks(names, tokenizer, length, haystack, contexts, seed)["tasks"].items():
        task.build_all_requests()
        asked = []
        for request in task.instances:
            prompt, options = request.args
            cut = max(prompt.rfind("\nQuestion: "), prompt.rfind("\nWhat "))
            question = tokenizer.encode(prompt[cut:], add_special_tokens=False)
            answers, room = request.doc["outputs"], options["max_gen_toks"]
            asked.append(Context(tokenizer.encode(prompt[:cut]), question, answers, room))
        found.append(Task(name, asked))
    return found


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    students: dict[str, PreTrainedModel],
    context: Context,
    memories: list[str],
) -> Iterator[tuple[str, int, float]]:
    """Of each memory, of :data:`BITS` or a compressed copy, the name, the bytes after the context, and the score."""
    reading = Reading(model, torch.tensor([context.ids]))
    for memory in memories:
        writer = students.get(memory, model)
        if memory in students:
            cache = reading.cache_of(writer)
            held = cache_bytes(cache)
        elif (bits := BITS[memory]) is None:
            cache, held = filled(reading.pairs, DynamicCache(config=model.config)), reading.tokens * token_bytes(model)
        else:
            cache = filled(reading.pairs, QuantizedCache("quanto", model.config, nbits=bits))
            held = coded_bytes(cache)
        yield memory, held, score(writer, tokenizer, cache, context)


def ask(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    students: dict[str, PreTrainedModel],
    task: Task,
) -> None:
    """Write what memories score, unless it is there."""
    for context in task.contexts:
        there = measured(folder, context)
        lacking = [name for name in (*BITS, *students) if (name, 0) not in there]
        if lacking:
            own = answers(model, tokenizer, students, context, lacking)
            add_found(folder, [Found(name, 0, task.name, context.digest, held, found) for name, held, found in own])


def merged(known: Known, tasks: list[Task], title: str) -> Table:
    """A row of each memory, by its bytes and then by what it finds; a column of each task."""
    heads = [task.name.removeprefix("ruler_").removeprefix("niah_") for task in tasks]
    shown = table("memory", "after a context", *heads, f"mean of {len(tasks)}")
    shown.title, rows = title, []
    for (memory, _), own in known.items():
        found = [[own.get(x.digest) for x in task.contexts] for task in tasks]
        if held := max((x.bytes for each in found for x in each if x), default=0):
            scores = [[x.score for x in each] if all(each) else [] for each in found]  # of tasks that were measured
            rows.append((-held, -sum(map(sum, scores)), memory, scores))
    for held, _, memory, scores in sorted(rows):
        cells, mean = [f"{fmean(own):.2f}" if own else "" for own in scores], ""
        if all(scores):
            every = torch.tensor([x for own in scores for x in own], dtype=torch.float64)
            low, high = bootstrap_interval(every, torch.ones_like(every))
            mean = f"{every.mean().item():.2f} ({low:.2f} to {high:.2f})"
        shown.add_row(memory, size(-held), *cells, mean)
    return shown


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    out: Annotated[Path, typer.Option(help="Folder of what is found.")],
    dofla_: Annotated[
        list[str] | None,
        typer.Option("--dofla", help="Options of dofla.compress, as size=3MiB,retrieval_heads=10; repeatable."),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Of RULER; repeatable; default all 11.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a context with question and answer.")] = 4096,
    contexts: Annotated[int, typer.Option(help="Of each task.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the contexts.")] = 0,
    haystack: Annotated[str, typer.Option(help="Source of the text in place of essays.")] = "sample",
    calibrate: Annotated[Path | None, typer.Option(help="Text to calibrate on; default the calibration known.")] = None,
    kvpress: Annotated[Path | None, typer.Option(help="Python of an environment with kvpress.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default the checkpoint's, where that is not slow.")] = None,
) -> None:
    names, options = task or [GROUP], {text: options_of(text) for text in dofla_ or []}
    if unknown := set(names) - {GROUP, *TASKS}:
        raise typer.BadParameter(f"--task {min(unknown)!r}: choose of {', '.join(TASKS)}")
    teacher, tokenizer = open_original(model, dtype)
    if (most := positions_of(teacher)) is not None and length > most:
        raise DoflaError(f"length {length}: {model} has {most} positions, give no more")
    tasks = tasks_of(tokenizer, names, length, contexts, haystack, seed)
    out.mkdir(parents=True, exist_ok=True)
    windows = calibrate and dofla.token_windows(calibrate, tokenizer, **default_cut(length))
    suffix = f", calibrated on {calibrate.name}" if calibrate else ""
    memories = {f"dofla, {text}{suffix}": own for text, own in options.items()}
    there = set.intersection(*(measured(out, context) for each in tasks for context in each.contexts))
    students = {
        memory: dofla.compress(copied(teacher), windows, tokenizer=tokenizer, **own)
        for memory, own in memories.items()
        if (memory, 0) not in there
    }
    for each in tasks:
        ask(out, teacher, tokenizer, students, each)
    if kvpress:
        known, asked = read_found(out), [context.digest for each in tasks for context in each.contexts]
        write_tasks(out, tasks, sorted({max(known[memory, 0][x].bytes for x in asked) for memory in memories}))
        subprocess.run([kvpress, Path(__file__).parent / "press_ruler.py", "--model", model, out], check=True)
    title = f"{model}: RULER, {length} tokens, {haystack} in place of its essays, contexts of each task: {contexts}"
    Console(width=220).print(merged(read_found(out), tasks, title))


if __name__ == "__main__":
    typer.run(main)
