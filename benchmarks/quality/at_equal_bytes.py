"""What is lost at equal state bytes: the methods side by side, each part of the default taken away, several budgets.

    python benchmarks/quality/at_equal_bytes.py --model demo
    python benchmarks/quality/at_equal_bytes.py --model smollm2-135m --set model=models/smollm2-135m --row "Measured" \
        --row "Window and sinks"

The rows are the students of benchmarks/quality/MODEL.yaml. What is measured stays in the run folder and is not measured
again, so a long run can be done in pieces; the tables are written there as Markdown and JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel

from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation import evaluate
from dofla.evaluation.language import next_token_figures
from dofla.feature_maps import feature_map_class
from dofla.feature_maps.heads import FeatureHeads
from dofla.integration.converted import Converted
from dofla.integration.recorder import evaluation_mode
from dofla.paper.bench import Bench
from dofla.paper.study import Study
from dofla.paper.table import Cell, Figure, Table
from dofla.runs.recipe import DataSpec, StudentSpec, apply_change, read_yaml
from dofla.runs.run import layer_mean
from dofla.runs.view import View
from dofla.storage.files import replacing, write_json


@dataclass
class Quality(Study):
    """A study, and the text that its students were not trained on: of ``other`` kind, and ``long``."""

    other: DataSpec = field(default_factory=DataSpec)
    long: DataSpec = field(default_factory=DataSpec)


def main(
    model: Annotated[str, typer.Option(help="A file of benchmarks/quality, without its ending.")] = "demo",
    row: Annotated[list[str] | None, typer.Option(help="A row of the file; repeatable; default: all.")] = None,
    seeds: Annotated[int, typer.Option(help="Of layerwise students; those trained end to end have the first.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/quality-MODEL.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the file; repeatable.")] = None,
) -> None:
    data = read_yaml(Path(__file__).parent / f"{model}.yaml") | {"seeds": list(range(seeds))}
    for each in change or []:
        apply_change(data, each)
    study = Quality.from_dict(data, f"{model}.yaml")
    unknown = set(row or []) - {spec.name for spec in study.students}
    if unknown:
        raise DoflaError(f"no row is called {min(unknown)!r}: {model}.yaml has {[s.name for s in study.students]}")
    folder, view = out or Path("runs") / f"quality-{model}", View()
    bench = Bench(study, folder, view)
    command = " ".join(
        ["python benchmarks/quality/at_equal_bytes.py --model", model, *(f"--set {x}" for x in change or [])]
    )
    specs = [spec for spec in study.students if not row or spec.name in row]
    table = (_language if bench.is_language_model else _embeddings)(bench, specs)
    table.command, table.seconds = command, bench.seconds
    with replacing(folder / "quality.md") as partial:
        partial.write_text(table.to_markdown(), encoding="utf-8")
    write_json(folder / "quality.json", table.to_dict())
    print(table.to_markdown())


def _language(bench: Bench, specs: list[StudentSpec]) -> Table:
    rows: list[list[Cell]] = []
    others = {name: bench.students.opened.windows(getattr(bench.study, name)) for name in ("other", "long")}
    for spec in specs:
        runs, texts = _measures(bench, spec, others)
        if not rows:
            rows.append(["Original", *[None] * 7, _kib(runs[0]["softmax_bytes"])])
        gaps = [Figure.of([run["language"]["loss_increase"] for run in runs])]
        gaps += [
            Figure.of([x[name]["loss_increase"] for x in texts])
            for name in ("other", "long", "no_window", "no_features")
        ]
        kl, error = (_mean_of_layers(runs, key) for key in ("kl", "output_error"))
        rows.append([spec.name, *gaps, kl, error, _kib(runs[0]["state_bytes"])])
    columns = [
        "student",
        "loss increase",
        *(f"loss increase, {x}" for x in ("other text", "long", "window off", "features off")),
    ]
    columns += ["attention KL", "output error", "state"]
    lengths = bench.students.opened.validation.length, others["long"].length
    return Table(
        f"{bench.study.model}, the bytes of {bench.study.budget} features per KV head unless the row says otherwise",
        columns,
        rows,
        key="quality",
        notes=[
            f"loss increase over the original in nats per token, at {lengths[0]} tokens; on text of another kind than "
            f"that trained on; at {lengths[1]} tokens; with window and sinks hidden, and with the features hidden",
            "± half the range over seeds, of features, training order and rows; students trained end to end have one",
            "state per sequence; the original's is its key-value cache",
        ],
    )


def _evaluations(bench: Bench, spec: StudentSpec, seeds: list[int]) -> list[dict[str, Any]]:
    """As ``bench.evaluations``, of these seeds."""
    windows, sizes = bench.students.opened.validation, bench.study.evaluate.sizes

    def measure(model: PreTrainedModel, seed: int) -> dict[str, Any]:
        return evaluate(model, windows, **sizes, seed=seed).to_dict()

    return [bench.of(spec, seed, "evaluation", partial(measure, seed=seed)) for seed in seeds]


def _measures(
    bench: Bench, spec: StudentSpec, others: dict[str, TokenWindows]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of each seed: the evaluation, and other texts and halves."""
    seeds = bench.study.seeds[:1] if spec.end_to_end or not spec.trained else bench.study.seeds

    def texts(model: PreTrainedModel) -> dict[str, Any]:
        with evaluation_mode(model):
            found = {name: next_token_figures(model, windows) for name, windows in others.items()}
            for name, what in (("no_window", "windows"), ("no_features", "features")):
                with hidden(model, what):
                    found[name] = next_token_figures(model, bench.students.opened.validation.take(4))
        return found

    return _evaluations(bench, spec, seeds), [bench.of(spec, seed, "texts", texts) for seed in seeds]


@contextmanager
def hidden(student: PreTrainedModel, what: str) -> Iterator[None]:
    """Within the block the layers that have both see their features alone, or their window and sinks alone."""
    groups = [x for layer in Converted.of(student).layers.values() for x in layer.groups if isinstance(x, FeatureHeads)]
    hybrid = [x for x in groups if (x.window or x.sinks) and x.features]
    kept, nothing = [(x.map, x.window, x.sinks) for x in hybrid], feature_map_class("none")
    for group in hybrid:
        if what == "windows":
            group.window = group.sinks = 0
        else:
            group.map = nothing(group.map.heads, group.map.head_dim, 0)
    try:
        yield
    finally:
        for group, (features, window, sinks) in zip(hybrid, kept, strict=True):
            group.map, group.window, group.sinks = features, window, sinks


def _embeddings(bench: Bench, specs: list[StudentSpec]) -> Table:
    rows: list[list[Cell]] = []
    for spec in specs:
        runs = _evaluations(bench, spec, bench.study.seeds[:1] if spec.end_to_end else bench.study.seeds)
        figures = [Figure.of([run["embeddings"][key] for run in runs]) for key in ("cosine", "spearman")]
        errors = [_mean_of_layers(runs, key) for key in ("kl", "output_error")]
        rows.append([spec.name, *figures, *errors, _kib(runs[0]["state_bytes"])])
    return Table(
        f"{bench.study.model}, the bytes of {bench.study.budget} features per head unless the row says otherwise",
        ["student", "cosine", "Spearman", "attention KL", "output error", "state"],
        rows,
        key="quality",
        notes=[
            "cosine of the original's and the student's embedding of a text, mean; rank correlation of the "
            "similarities of all pairs of texts; ± half the range over seeds"
        ],
    )


def _mean_of_layers(runs: list[dict[str, Any]], key: str) -> Cell:
    values = [layer_mean(run, key) for run in runs]
    return "∞" if max(values) > 1e3 else Figure.of(values)


def _kib(size: int) -> str:
    return f"{size / 1024:.0f} KiB"


if __name__ == "__main__":
    try:
        typer.run(main)
    except DoflaError as error:
        sys.exit(f"dofla: {error}")
