"""Looking things up: what a memory of constant size finds again of single facts in a long context, by generation,
beside the original and a window of the same bytes.

    python benchmarks/peers/lookups.py models/smollm2-135m --calibrate ../shared/data/english-train.txt.gz \\
        --text ../shared/data/books-val.txt.gz --out runs/lookups

Kinds of question are those of RULER (needles.py): *single*, a needle among sentences about nothing; *multi-key*, one
of four needles in prose (``--text``); *variables*, four assignments that lead from one variable to the next; *common
words* of a list. A score is the share of what was asked for that stands in what the model writes, greedily; a mean over
questions with an interval of 95 % by bootstrap over contexts.

Of each kind the template is taken that the original does best with, at the shortest length, on contexts of their own,
among those of ``--template``, if some are named; what it scores less than ``--least`` with is left out, since nothing
can be lost there. What is measured stays in the folder and is not measured again. With ``--retrieval-heads`` there is
one more memory, some of whose KV heads hold every token of ``--reach``.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from continuation import OURS, SOFTMAX, students
from needles import KINDS, Context, Writer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.data import TokenWindows
from dofla.display import size, table
from dofla.errors import DoflaError
from dofla.evaluation.generation import check_room, decode
from dofla.evaluation.language import bootstrap_interval
from dofla.integration.cache import cache_bytes
from dofla.integration.prompt_state import read_prompt
from dofla.integration.sites import evaluation_mode
from dofla.runs.teacher import load_teacher
from dofla.storage.files import write_json

CHOOSING, ASKING = 1, 0
"""Seeds: of the contexts that choose templates, and of those that are judged."""


@dataclass
class Found:
    """Scores of one memory on the questions of each context."""

    memory: str
    kind: str
    template: str
    length: int
    bytes: int
    scores: list[list[float]]

    @property
    def mean(self) -> float:
        return sum(map(sum, self.scores)) / sum(map(len, self.scores))

    @property
    def cell(self) -> str:
        sums, counts = (torch.tensor([f(x) for x in self.scores], dtype=torch.float64) for f in (sum, len))
        low, high = bootstrap_interval(sums, counts)
        return f"{self.mean:.2f} ({low:.2f} to {high:.2f})"


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context) -> tuple[list[float], int]:
    """The score of each question, from one reading of the context; and the bytes of the cache after it."""
    cache = read_prompt(model, torch.tensor([context.ids]))
    scores = []
    for question in context.questions:
        own, ids = copy.deepcopy(cache), torch.tensor([question.ids])
        read_prompt(model, ids[:, :-1], cache=own)
        written = decode(model, own, ids[:, -1:], question.room)
        scores.append(question.score(tokenizer.decode(written[0])))
    return scores, cache_bytes(cache)


class Asking:
    """Asks, and keeps what was found in a folder, a file for each memory, kind and length."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.writer, self.folder = writer, folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, memory: str, kind: str, template: str, length: int) -> Path:
        return self.folder / f"{memory}, {kind}, {template}, {length}.json"

    def there(self, memory: str, kind: str, template: str, length: int, contexts: int) -> Found | None:
        """What was found before, if on so many contexts."""
        path = self.path(memory, kind, template, length)
        found = Found(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        return found if found and len(found.scores) == contexts else None

    def ask(
        self, memory: str, model: PreTrainedModel, kind: str, template: str, length: int, contexts: int, seed: int
    ) -> Found:
        """Measured now, or found before."""
        if found := self.there(memory, kind, template, length, contexts):
            return found
        found = Found(memory, kind, template, length, 0, [])
        with evaluation_mode(model):
            for context in self.writer.contexts(kind, template, length, contexts, seed):
                scores, held = answer(model, self.writer.tokenizer, context)
                found.scores.append(scores)
                found.bytes = max(found.bytes, held)
        write_json(self.path(memory, kind, template, length), asdict(found))
        return found


def merged(found: list[Found], memories: list[str]) -> Table:
    """A row of each memory, a column of each kind and length."""
    cells = {(x.memory, x.kind, x.length): x for x in found}
    columns = sorted({(x.kind, x.length) for x in found})
    heads = [f"{kind}, {length} ({sum(map(len, cells[memories[0], kind, length].scores))})" for kind, length in columns]
    shown = table("memory", "at most", *heads)
    for memory in memories:
        own = [cells[memory, kind, length] for kind, length in columns]
        shown.add_row(memory, size(max(x.bytes for x in own)), *(x.cell for x in own))
    return shown


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[Path, typer.Option(help="Text to measure directions on.")],
    text: Annotated[Path, typer.Option(help="Prose to hide needles in.")],
    out: Annotated[Path, typer.Option(help="Folder of what is found.")],
    kind: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; repeatable; default all.")] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="To choose of, in kinds that have it; repeatable; default all.")
    ] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Features per KV head; repeatable; default 64, 256.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable; default 1024 and 2048.")] = None,
    questions: Annotated[int, typer.Option(help="Of each kind and length, at least.")] = 50,
    choosing: Annotated[int, typer.Option(help="Contexts that choose among templates.")] = 6,
    least: Annotated[float, typer.Option(help="Score of the original with which a kind is worth asking.")] = 0.3,
    reach: Annotated[int | None, typer.Option(help="Positions that memories are for; default all there are.")] = None,
    retrieval_heads: Annotated[int, typer.Option(help="KV heads that hold every token, in one more memory.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="Default the checkpoint's, where that is not slow.")] = None,
) -> None:
    kinds, lengths, budgets = kind or list(KINDS), length or [1024, 2048], budget or [64, 256]
    if unknown := set(kinds) - KINDS.keys():
        raise typer.BadParameter(f"no kind is called {min(unknown)!r}: choose of {', '.join(KINDS)}")
    templates = {each: [name for name in KINDS[each][1] if name in (template or KINDS[each][1])] for each in kinds}
    if template and (lacking := [each for each, own in templates.items() if not own]):
        of = "; ".join(f"{each}: {', '.join(KINDS[each][1])}" for each in lacking)
        raise typer.BadParameter(f"no template left for {', '.join(lacking)}: choose of {of}")
    if min(questions, choosing) < 1:
        raise DoflaError(f"questions: {questions}, choosing: {choosing}; give 1 at least of each")
    teacher, tokenizer = load_teacher(model, dtype)
    check_room(teacher, max(lengths))
    known = dofla.token_windows(calibrate, tokenizer, length=512, windows=12)
    asking = Asking(Writer(tokenizer, _tokens(text, tokenizer)), out)
    console, found, memories = Console(width=220), [], [SOFTMAX]
    chosen: dict[str, str] = {}
    # A model is asked in the attention it has; the original's is that of a student whose layers are all softmax.
    dofla.linearize(teacher, budget=16)
    with dofla.softmax(teacher):
        for each in kinds:
            tried = {
                template: asking.ask("choosing", teacher, each, template, min(lengths), choosing, CHOOSING).mean
                for template in templates[each]
            }
            best = max(tried, key=tried.__getitem__)
            console.print(f"{each}: the original scores {', '.join(f'{x:.2f} ({name})' for name, x in tried.items())}")
            if tried[best] >= least:
                chosen[each] = best
        wanted = [(each, template, n) for each, template in chosen.items() for n in lengths]
        count = {each: -(-questions // _asked(asking.writer, each, chosen[each], min(lengths))) for each in chosen}
        for each, template, n in wanted:
            found.append(asking.ask(SOFTMAX, teacher, each, template, n, count[each], ASKING))
    dofla.restore(teacher)
    if not wanted:
        raise DoflaError(f"the original scores below {least} on every kind: give a smaller --least or a larger model")
    for features in budgets:
        made = students(features, known, None, reach)
        if retrieval_heads:
            options = {"budget": features, "reach": reach, "retrieval_heads": retrieval_heads, "tokenizer": tokenizer}
            made[f"{OURS}, {retrieval_heads} retrieval heads"] = partial(dofla.fade, tokens=known, **options)
        for name, make in made.items():
            memory = f"{name}, {features}" + ("" if reach is None else f", reach {reach}")
            memories.append(memory)
            there = [asking.there(memory, each, template, n, count[each]) for each, template, n in wanted]
            if not all(there):
                student = make(teacher)
                there = [
                    asking.ask(memory, student, each, template, n, count[each], ASKING) for each, template, n in wanted
                ]
                dofla.restore(teacher)
            found += there
    console.print(merged(found, memories))


def _tokens(text: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    windows: TokenWindows = dofla.token_windows(text, tokenizer, length=512, split="all")
    return windows.input_ids.flatten().tolist()


def _asked(writer: Writer, kind: str, template: str, length: int) -> int:
    """Questions of a context."""
    return len(writer.contexts(kind, template, length, 1, ASKING)[0].questions)


if __name__ == "__main__":
    typer.run(main)
