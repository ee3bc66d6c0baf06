"""Multiple-choice tasks: local files, likelihoods, lm-evaluation-harness, teacher and student side by side. Knows
models, softmax or linear.

task    = load_task("piqa.jsonl")
student = score(model, tokenizer, task)
with dofla.softmax(model):
    teacher = score(model, tokenizer, task)
compare(teacher, student)
"""

from dofla.tasks.compare import Pair, compare, win_and_tie
from dofla.tasks.harness import harness_folder, run_harness
from dofla.tasks.items import Item, Task
from dofla.tasks.reading import load_task
from dofla.tasks.results import Accuracy, Comparison, TaskResults, WinAndTie
from dofla.tasks.run import evaluate_tasks
from dofla.tasks.scores import METRICS, TaskScores
from dofla.tasks.scoring import score
from dofla.tasks.styles import KNOWN, STYLES, Request

__all__ = [
    "KNOWN",
    "METRICS",
    "STYLES",
    "Accuracy",
    "Comparison",
    "Item",
    "Pair",
    "Request",
    "Task",
    "TaskResults",
    "TaskScores",
    "WinAndTie",
    "compare",
    "evaluate_tasks",
    "harness_folder",
    "load_task",
    "run_harness",
    "score",
    "win_and_tie",
]
