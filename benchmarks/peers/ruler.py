"""RULER (Hsieh et al. 2024, arXiv 2404.06654): what a memory finds again in a long context, by generation: dofla's, the
original's, what one would use instead.

    python benchmarks/peers/ruler.py --model models/qwen2.5-coder-0.5b --length 4096 --contexts 20 --out runs/ruler \\
        --dofla size=3MiB --dofla size=6MiB,retrieval_heads=10,context=4096 --kvpress build/peers/bin/python

Tasks are 11 of RULER's 13, by the generators of lm-evaluation-harness (``pip install -e ".[ruler]"``) and without a
network: where RULER has essays stands ``--haystack``, by default the text that comes with dofla. All rows see the same
contexts, those of ``--seed``. A context is read once for each row, before anyone asks; the question follows on it. A
score is the share of the answers that stand in what the model writes, greedily, within the tokens that RULER allows.
The mean is that of all tasks, with an interval of 95 % by bootstrap over contexts.

Rows are the softmax cache, transformers' QuantizedCache of 4 bits where optimum-quanto is installed, and one of each
``--dofla``, whatever options of :func:`dofla.compress` it names. With ``--kvpress``, the Python of an environment with
``benchmarks/peers/requirements.txt``, press_ruler.py adds presses of the bytes that each of the latter holds after a
context. What is measured stays in the folder and is not measured again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from continuation import CODED, coded_bytes, options_of
from judging import SOFTMAX, filled, token_bytes
from questions import Context, Found, Task, read_found, score, write_tasks
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, QuantizedCache

import dofla
from dofla.display import size, table
from dofla.errors import DoflaError
from dofla.evaluation.language import bootstrap_interval
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode
from dofla.runs.opening import open_original
from dofla.serving.prompt_state import read_prompt
from dofla.tasks.harness import quiet
from dofla.tasks.ruler import GROUP, TASKS, ruler_tasks

Answers = Callable[[Context], list[tuple[float, int]]]
"""Of each memory the score, and the bytes after the context."""
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


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context) -> list[tuple[float, int]]:
    """By the cache of a compressed model."""
    with evaluation_mode(model):
        cache = read_prompt(model, torch.tensor([context.ids]))
        held = cache_bytes(cache)
        return [(score(model, tokenizer, cache, context), held)]


@torch.no_grad()
def answer_softmax(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context
) -> list[tuple[float, int]]:
    """By all of :data:`BITS`, from one reading: a softmax cache, and transformers' QuantizedCache, which has coded the
    whole context."""
    read, found = DynamicCache(config=model.config), []
    model.base_model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: read})
    pairs = [(layer.keys, layer.values) for layer in read.layers]
    for bits in BITS.values():
        if bits is None:
            cache, held = filled(pairs, DynamicCache(config=model.config)), len(context.ids) * token_bytes(model)
        else:
            cache = filled(pairs, QuantizedCache("quanto", model.config, nbits=bits))
            held = coded_bytes(cache)
        found.append((score(model, tokenizer, cache, context), held))
    return found


def ask(folder: Path, memories: Sequence[str], answers: Answers, task: Task) -> None:
    """Write what these memories score, unless it is there."""
    there = read_found(folder, task)
    if all((memory, 0) in there for memory in memories):
        return
    for memory, own in zip(memories, zip(*map(answers, task.contexts), strict=True), strict=True):
        scores, held = zip(*own, strict=True)
        Found(memory, 0, task.name, task.digest, max(held), list(scores)).write(folder)


def merged(folder: Path, tasks: list[Task], title: str) -> Table:
    """A row of each memory in the folder, by its bytes and then by what it finds; a column of each task."""
    columns = [read_found(folder, task) for task in tasks]
    rows = {row: [column.get(row) for column in columns] for column in columns for row in column}
    heads = [task.name.removeprefix("ruler_").removeprefix("niah_") for task in tasks]
    shown = table("memory", "after a context", *heads, f"mean of {len(tasks)}")
    shown.title = title
    order = {row: (-max(x.bytes for x in own if x), -sum(x.mean for x in own if x)) for row, own in rows.items()}
    for row in sorted(rows, key=order.__getitem__):
        cells, mean = [f"{x.mean:.2f}" if x else "" for x in rows[row]], ""
        if all(rows[row]):
            scores = torch.tensor([value for x in rows[row] for value in x.scores], dtype=torch.float64)
            low, high = bootstrap_interval(scores, torch.ones_like(scores))
            mean = f"{scores.mean().item():.2f} ({low:.2f} to {high:.2f})"
        shown.add_row(row[0], size(-order[row][0]), *cells, mean)
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
    for each in tasks:
        ask(out, list(BITS), partial(answer_softmax, teacher, tokenizer), each)
    known = calibrate and dofla.token_windows(calibrate, tokenizer, length=512, windows=12)
    limits = []
    for text, own in options.items():
        memory = f"dofla, {text}" + (f", calibrated on {calibrate.name}" if calibrate else "")
        if any((memory, 0) not in read_found(out, each) for each in tasks):
            dofla.compress(teacher, known, tokenizer=tokenizer, **own)
            for each in tasks:
                ask(out, [memory], partial(answer, teacher, tokenizer), each)
            dofla.restore(teacher)
        limits.append(max(read_found(out, each)[memory, 0].bytes for each in tasks))
    write_tasks(out, tasks, sorted(set(limits)))
    if kvpress:
        subprocess.run([kvpress, Path(__file__).parent / "press_ruler.py", "--model", model, out], check=True)
    title = f"{model}: RULER, {length} tokens, {haystack} in place of its essays, contexts of each task: {contexts}"
    Console(width=220).print(merged(out, tasks, title))


if __name__ == "__main__":
    typer.run(main)
