"""NVIDIA's kvpress on the questions that lookups.py wrote: rows for its table.

    python -m venv build/peers && build/peers/bin/pip install -r benchmarks/peers/requirements.txt
    build/peers/bin/python benchmarks/peers/press_lookups.py models/smollm2-135m runs/lookups

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
from pathlib import Path

import torch
from judging import token_bytes
from kvpress import DecodingPress
from presses import KINDS, PRESSES, Memory, Trial, attention, compressing, ratio_to
from questions import Context, Found, Question, Task, read_found, read_tasks, write
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

WAYS = {"once": KINDS["once"], "kvzip": KINDS["kvzip"], "held": KINDS["held"], "question known": ["SnapKV", "TOVA"]}
NOTES = {"held": ", held", "question known": ", question known"}


@torch.no_grad()
def remembered(model: PreTrainedModel, ids: list[int], trials: list[Trial]) -> list[Memory]:
    """What each trial leaves of these tokens, all from one reading of them but KVzip, which reads them its own way."""
    ids_, presses = torch.tensor([ids]), [PRESSES[x.press](ratio_to(x.least, len(ids))) for x in trials]
    if any(trial.kind == "kvzip" for trial in trials):
        return [_remembered_by_kvzip(model, ids_, press) for press in presses]
    with compressing(model, presses) as memories:
        model.model(ids_, past_key_values=DynamicCache(config=model.config))
    return memories


def _remembered_by_kvzip(model: PreTrainedModel, ids: torch.Tensor, press) -> Memory:
    cache = DynamicCache(config=model.config)
    with press(model):
        model.model(input_ids=ids, past_key_values=cache)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    return Memory(pairs, [module.masked_key_indices for module in attention(model)])


def written(model: PreTrainedModel, memory: Memory, trial: Trial, question: Question, at: int) -> list[int]:
    """The answer to a question that follows on ``at`` tokens; of those of the question that are not in the memory."""
    cache = memory.cache(model)
    if trial.kind != "held":
        return write(model, cache, question.ids, at, question.room)
    with DecodingPress(PRESSES[trial.press](0.0), compression_interval=1, target_size=trial.least)(model):
        return write(model, cache, question.ids, at, question.room, chunk=trial.kept - trial.least)


def answers(model: PreTrainedModel, context: Context, trials: list[Trial]) -> Iterator[tuple[Trial, list[int]]]:
    """Of each question, what each trial writes."""
    if trials[0].kind != "question known":
        memories = remembered(model, context.ids, trials)
        for question in context.questions:
            for trial, memory in zip(trials, memories, strict=True):
                yield trial, written(model, memory, trial, question, len(context.ids))
        return
    for question in context.questions:
        ids = context.ids + question.ids[:-1]
        rest = Question(question.ids[-1:], question.answers, question.room)
        for trial, memory in zip(trials, remembered(model, ids, trials), strict=True):
            yield trial, written(model, memory, trial, rest, len(ids))


def fill(model: PreTrainedModel, tokenizer, folder: Path, task: Task, trials: list[Trial]) -> None:
    """Write what is not there of these trials, of one way, on a task."""
    there = read_found(folder, task)
    trials = [x for x in trials if (x.press + NOTES.get(x.kind, ""), x.limit) not in there]
    scores: dict[Trial, list[list[float]]] = {trial: [] for trial in trials}
    for context in task.contexts if trials else ():
        asked = {trial: iter(context.questions) for trial in trials}
        for own in scores.values():
            own.append([])
        for trial, ids in answers(model, context, trials):
            scores[trial][-1].append(next(asked[trial]).score(tokenizer.decode(ids)))
    for trial, own in scores.items():
        held = trial.kept * token_bytes(model)
        name = trial.press + NOTES.get(trial.kind, "")
        Found(name, trial.limit, task.kind, task.template, task.length, held, own).write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name, as for lookups.py")
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
