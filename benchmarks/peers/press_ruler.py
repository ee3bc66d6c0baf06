"""NVIDIA's kvpress on the contexts that ruler.py wrote: rows for its table.

    python -m venv build/peers && build/peers/bin/pip install -r benchmarks/peers/requirements.txt
    build/peers/bin/python benchmarks/peers/press_ruler.py --model models/qwen2.5-coder-0.5b runs/ruler

In an environment of its own, as presses.py; nothing of dofla. Ways to use a press:

- once: the cache is compressed when the context has been read, before anyone asks, to as many tokens as have the bytes
  of dofla's cache in bfloat16; question and answer are added to it;
- kvzip: the same with KVzip, which reads the context twice;
- held: question and answer are written within kvpress's DecodingPress, so that the cache does not grow;
- question known: it is compressed when the question has been read as well, which is then what the press looks at last.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from judging import token_bytes
from presses import KINDS, PRESSES, Memory, Trial, compressing, ratio_to, read_within
from questions import Context, Found, Task, add_found, measured, read_tasks, score
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


def scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context, trials: list[Trial]
) -> list[float]:
    """Of each trial, all of one way."""
    if trials[0].kind == "question known":
        *known, last = context.question
        context = Context(context.ids + known, [last], context.answers, context.room)
    found = []
    for trial, memory in zip(trials, remembered(model, context.ids, trials), strict=True):
        cache = memory.cache(model)
        if trial.kind != "held":
            found.append(score(model, tokenizer, cache, context))
            continue
        with trial.holding()(model):
            found.append(score(model, tokenizer, cache, context, chunk=trial.kept - trial.least))
    return found


def fill(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, task: Task, trials: list[Trial]
) -> None:
    """Write what is not there of these trials, of one way, on a task."""
    for context in task.contexts:
        there = measured(folder, context)
        asked = [x for x in trials if (x.memory, x.limit) not in there]
        if asked:
            own = zip(asked, scores(model, tokenizer, context, asked), strict=True)
            each = token_bytes(model)
            found = [Found(x.memory, x.limit, task.name, context.digest, x.kept * each, score) for x, score in own]
            add_found(folder, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name, as for ruler.py")
    parser.add_argument("folder", type=Path, help="that ruler.py wrote")
    parser.add_argument("--way", action="append", choices=WAYS, help="repeatable; default: once, kvzip")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks, limits = read_tasks(options.folder)
    each = token_bytes(model)
    for task in tasks:
        for way in options.way or ("once", "kvzip"):
            trials = [Trial(press, way, limit, limit // each) for limit in limits for press in WAYS[way]]
            fill(model, tokenizer, options.folder, task, trials)


if __name__ == "__main__":
    main()
