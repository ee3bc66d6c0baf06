"""Tasks by lm-evaluation-harness: its own, and multiple-choice items of local files; original and converted model side
by side.

task = load_task("piqa.jsonl")
(scores,) = score(model, tokenizer, [task])
results = evaluate_tasks(model, tokenizer, [task, "gsm8k"])
"""

from dofla.tasks.harness import harness_task
from dofla.tasks.items import Item, Task
from dofla.tasks.reading import load_task
from dofla.tasks.results import Comparison, Difference, TaskResults, compare
from dofla.tasks.run import evaluate_tasks, score
from dofla.tasks.scores import Metric, TaskScores
from dofla.tasks.styles import KNOWN, STYLES, Request

__all__ = [
    "KNOWN",
    "STYLES",
    "Comparison",
    "Difference",
    "Item",
    "Metric",
    "Request",
    "Task",
    "TaskResults",
    "TaskScores",
    "compare",
    "evaluate_tasks",
    "harness_task",
    "load_task",
    "score",
]
