"""NVIDIA's kvpress on the questions that lookups.py wrote: rows for its table.

    python -m venv build/peers && build/peers/bin/pip install -r benchmarks/peers/requirements.txt
    build/peers/bin/python benchmarks/peers/press_lookups.py --model models/smollm2-135m runs/lookups

In an environment of its own, as presses.py; nothing of dofla. Ways to use a press:

- once: the cache is compressed when the context has been read, before anyone asks, to as many tokens as have the bytes
  of dofla's state in bfloat16; question and answer are added to it;
- held: question and answer are written within kvpress's DecodingPress, so that the cache does not grow;
- question known: it is compressed when the question has been read as well, which is then what the press looks at last.
  The context is read again for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from judging import token_bytes
from presses import KINDS, PRESSES, Memory, Trial, compressing, ratio_to, read_within
from questions import Context, Found, Question, Task, read_found, read_tasks, write
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

WAYS = {"once": KINDS["once"], "kvzip": KINDS["kvzip"], "held": KINDS["held"], "question known": ["SnapKV", "TOVA"]}


@torch.no_grad()
def remembered(model: PreTrainedModel, ids: list[int], trials: list[Trial]) -> list[Memory]:
    """What each trial, all of one way, leaves of these tokens, from one reading of them; KVzip has its own."""
    context, presses = torch.tensor([ids]), [PRESSES[x.press](ratio_to(x.least, len(ids))) for x in trials]
    if trials[0].kind == "kvzip":
        return [read_within(model, context, press)[0] for press in presses]
    with compressing(model, presses) as memories:
        model.model(context, past_key_values=DynamicCache(config=model.config))
    return memories


def written(model: PreTrainedModel, memory: Memory, trial: Trial, question: Question, at: int) -> list[int]:
    """The answer to a question that follows on ``at`` tokens, of which the memory is left."""
    cache = memory.cache(model)
    if trial.kind != "held":
        return write(model, cache, question.ids, at, question.room)
    with trial.holding()(model):
        return write(model, cache, question.ids, at, question.room, chunk=trial.kept - trial.least)


def answers(model: PreTrainedModel, context: Context, trials: list[Trial]) -> Iterator[list[list[int]]]:
    """For each question what each trial, all of one way, writes."""
    known, memories = trials[0].kind == "question known", []
    for question in context.questions:
        ids, rest = context.ids, question
        if known:
            ids, rest = context.ids + question.ids[:-1], replace(question, ids=question.ids[-1:])
        if known or not memories:
            memories = remembered(model, ids, trials)
        pairs = zip(trials, memories, strict=True)
        yield [written(model, memory, trial, rest, len(ids)) for trial, memory in pairs]


def fill(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, task: Task, trials: list[Trial]
) -> None:
    """Write what is not there of these trials, of one way, on a task."""
    there = read_found(folder, task)
    trials = [trial for trial in trials if (trial.memory, trial.limit) not in there]
    scores: list[list[list[float]]] = []  # of each context, question and trial
    for context in task.contexts if trials else ():
        told = zip(context.questions, answers(model, context, trials), strict=True)
        scores.append([[question.score(tokenizer.decode(ids)) for ids in all_of] for question, all_of in told])
    for place, trial in enumerate(trials):
        own = [[of_trials[place] for of_trials in of_questions] for of_questions in scores]
        held = trial.kept * token_bytes(model)
        Found(trial.memory, trial.limit, task.kind, task.template, task.length, held, own).write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name, as for lookups.py")
    parser.add_argument("folder", type=Path, help="that lookups.py wrote")
    parser.add_argument("--way", action="append", choices=WAYS, help="repeatable; default: all")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks, limits = read_tasks(options.folder)
    each = token_bytes(model)
    for task in tasks:
        for way in options.way or WAYS:
            trials = [Trial(press, way, limit, limit // each) for limit in limits for press in WAYS[way]]
            fill(model, tokenizer, options.folder, task, trials)


if __name__ == "__main__":
    main()
