"""A compressed model in lm-evaluation-harness: its HFLM takes the model as it is. Without a name of the harness's
tasks, a few questions made here, which need no network.

    pip install 'dofla[eval]'
    python examples/lm_eval_harness.py [MODEL] [TASK,TASK...]
"""

from __future__ import annotations

import sys

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from opening import open_converted

import dofla
from dofla.tasks import Item, Task, harness_task

QUESTIONS = [
    ("Lily was very happy. She had a big smile on her", ("face", "door", "lunch")),
    ("Tom was tired, so he went to", ("bed", "tall", "of")),
    ("It was raining, and the little cat got very", ("wet", "loud", "round")),
    ("They said thank you and ran back", ("home", "under", "with")),
]


def main(name: str = "demo", tasks: str | None = None) -> dict[str, dict[str, float]]:
    model, tokenizer = open_converted(name)
    items = [Item(text, words, answer=0, id=n) for n, (text, words) in enumerate(QUESTIONS)]
    wanted = tasks.split(",") if tasks else [harness_task(Task("next_word", "plain", items))]
    manager = TaskManager(include_defaults=tasks is not None)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    options = {"tasks": wanted, "task_manager": manager, "bootstrap_iters": 0}
    found = {"compressed": simple_evaluate(lm, **options)["results"]}
    with dofla.original(model):
        found["original"] = simple_evaluate(lm, **options)["results"]
    accuracies = {who: {task: row["acc,none"] for task, row in results.items()} for who, results in found.items()}
    for who, row in accuracies.items():
        print(who, *(f"{task} {accuracy:.1%}" for task, accuracy in row.items()))
    return accuracies


if __name__ == "__main__":
    main(*sys.argv[1:])
