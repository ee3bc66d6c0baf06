"""Likelihood and generation side by side: a student can keep the one and lose the other."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from dofla.errors import DoflaError
from dofla.evaluation.probe import PROBES, probe
from dofla.evaluation.recall import RecallText, WordPairs
from dofla.paper.bench import Bench, recalled
from dofla.paper.methods import baselines, other_maps, trained
from dofla.paper.table import Cell, Figure, Table
from dofla.runs.demo.recall import Villagers
from dofla.runs.recipe import StudentSpec


def likelihood_and_generation(bench: Bench) -> Table:
    """Loss increase early and late in the context, continuations as the original judges them, agreement, and recall."""
    spec = bench.study.probe
    students = [baselines()[-1], *(trained(label, "softmax") for label in ("Fix", "DoF", "DoF + Clip"))]
    students += [trained("Fix", "direct"), other_maps()[0]]
    records = {student.name: _probed(bench, student) for student in students}
    first = next(iter(records.values()))[0]
    rows: list[list[Cell]] = [
        ["Original", None, None, *_texts([first], "teacher"), None, None, *_recall([first], "teacher")]
    ]
    for name, several in records.items():
        bins = [record["positions"]["bins"] for record in several]
        increases = [Figure.of([run[place]["loss_increase"] for run in bins], 2) for place in (0, -1)]
        agreement = [record["generation"]["agreement"] for record in several]
        forced = Figure.of([statistics.fmean(run["forced"]) for run in agreement], 2)
        together = Figure.of([record["generation"]["agreed_tokens"] for record in several], 1)
        rows.append([name, *increases, *_texts(several, "student"), forced, together, *_recall(several, "student")])
    last = first["positions"]["bins"][-1]
    columns = [
        "model",
        "loss increase, first tokens",
        f"loss increase, {last['first']} on",
        "judged loss, greedy",
        "judged loss, sampled",
    ]
    columns += ["repeated", "forced agreement", "tokens together", "recall, chosen", "recall, written"]
    return Table(
        "probe",
        "Likelihood and generation",
        columns,
        rows,
        notes=[
            "loss increase by position in the context; judged loss: the original's loss on continuations, nats per "
            f"token ({spec.prompts} prompts, {spec.new_tokens} tokens); repeated: 4-grams of greedy text that "
            "came before",
            "forced agreement: how often both find the same next token on the original's own text; tokens together: "
            "how many tokens the greedy texts share from the start",
            _recall_note(bench, first),
        ],
        data={"records": records},
    )


def _recall_note(bench: Bench, record: dict[str, Any]) -> str:
    if "recall" not in record:
        return "recall: not asked, for the tokenizer marks no words"
    lengths = ", ".join(map(str, bench.study.probe.lengths))
    return (
        f"recall of {record['recall']['text']}, {lengths} tokens: the right answer likeliest among those of the "
        "context; likeliest of all tokens, so that it would be written"
    )


def _recall_text(bench: Bench) -> RecallText | None:
    """The demo's own; otherwise pairs of words, if the tokenizer has any."""
    tokenizer = bench.workshop.tokenizer
    if bench.study.validation.source == "demo":
        return Villagers(tokenizer)
    try:
        return WordPairs(tokenizer)
    except DoflaError:
        return None


def _probed(bench: Bench, student: StudentSpec) -> list[dict[str, Any]]:
    spec, workshop = bench.study.probe, bench.workshop
    text = _recall_text(bench)
    wanted = [name for name in PROBES if name != "passkey" and (name != "recall" or text is not None)]
    sizes = {k: getattr(spec, k) for k in ("prompts", "prompt_tokens", "new_tokens", "lengths", "count", "batch_size")}

    def measure(model: PreTrainedModel, seed: int) -> dict[str, Any]:
        windows = workshop.validation()
        return probe(model, workshop.tokenizer, windows, wanted=wanted, recall_text=text, seed=seed, **sizes).to_dict()

    return [
        bench.of_student(student, seed, "probe", partial(measure, seed=seed))
        for seed in bench.study.seeds[: spec.seeds]
    ]


def _texts(records: list[dict[str, Any]], who: str) -> list[Cell]:
    """Loss of the original on the greedy and the sampled text, and how much the greedy one repeats."""
    texts = [record["generation"]["texts"] for record in records]
    losses = [Figure.of([run[f"{who}_{kind}"]["teacher_loss"] for run in texts], 2) for kind in ("greedy", "sampled")]
    return [*losses, Figure.of([run[f"{who}_greedy"]["repeated"] for run in texts], 2)]


def _recall(records: list[dict[str, Any]], who: str) -> list[Cell]:
    if any("recall" not in record for record in records):
        return [None, None]
    return [Figure.of([recalled(record, who, key) for record in records], 2) for key in ("accuracy", "greedy")]
