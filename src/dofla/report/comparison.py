"""The section on one or several runs: their models compared."""

import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dofla.display import Part, factor, figure, size, table
from dofla.evaluation.verdict import LIKENESS, LOSSES, embedding_words, level, verdict, worst_of
from dofla.report import charts
from dofla.report.charts import ORIGINAL, Chart, Row
from dofla.report.page import Section
from dofla.report.runs import ModelRecord, RunRecord, naming
from dofla.report.speed import crossing
from dofla.runs.comparison import excerpt
from dofla.runs.demo import model_path
from dofla.runs.recipe import Distillation

T = TypeVar("T")
Models = Mapping[str, ModelRecord]
"""Models by their names on the page, the one that lost least first."""

_RULES = {
    "language": "Loss increase and KL are in nats per token. "
    f"Close: the interval of the loss increase ends at {LOSSES[0]} or below; worse: at {LOSSES[1]} or below; the "
    "increase itself, where too few windows have no interval. "
    "Smaller from: the context from which on the cache is smaller than the original's.",
    "embeddings": f"Close: cosine and rank correlation are {LIKENESS[0]} or more; worse: {LIKENESS[1]} or more.",
}


def section_of(runs: Sequence[RunRecord]) -> Section:
    """The section on runs all of language models or all of encoders; DoflaError naming a folder with wrong records."""
    names = _names([run.folder for run in runs])
    found = [(f"{model.name}{name}", model) for name, run in zip(names, runs, strict=True) for model in run.models]
    models = dict(sorted(found, key=lambda pair: pair[1].lost))
    best, model = next(iter(models.items()))
    commands = [f"dofla report {' '.join(shlex.quote(str(run.folder)) for run in runs)} --speed"]
    if model.section == "language":
        commands.insert(0, f'dofla generate {shlex.quote(str(model.adapter))} --prompt "Once upon a time"')
    with naming(model.folder):
        said = _verdict(model)
    written: dict[str, dict[str, str]] = {}  # by prompt and writer, the original first
    for label, samples in _each(models, lambda model: model.samples):
        for prompt, original, own in samples:
            written.setdefault(prompt, {ORIGINAL: original})[label] = own
    return Section(
        title=", ".join(dict.fromkeys(model_title(run.recipe.model) for run in runs)),
        verdict=f"{best}: {said}" if len(models) > 1 else said,
        evaluated=[_evaluated(run) for run in runs],
        parts=[*_table(models), _RULES[model.section]],
        charts=_charts(runs, models),
        samples=[(excerpt(prompt), list(texts.items())) for prompt, texts in written.items()],
        commands=commands,
        recipes=[(str(run.folder), run.text) for run in runs],
    )


def model_title(name: str) -> str:
    """A model's name without the path to it."""
    if name == "demo" or Path(name) == model_path():
        return "The bundled model"
    path = Path(name.removeprefix("package:"))
    return path.parent.name if path.name == "model" else path.name


def _names(folders: Sequence[Path]) -> list[str]:
    """The run, in parentheses after the name of a model; empty if there is but one run."""
    if len(folders) == 1:
        return [""]
    names = [folder.resolve().name for folder in folders]
    return [f" ({name if names.count(name) == 1 else folder})" for name, folder in zip(names, folders, strict=True)]


def _each(models: Models, of: Callable[[ModelRecord], T]) -> Iterator[tuple[str, T]]:
    """Something of each model; what is wrong with its records is a DoflaError naming its folder."""
    for label, model in models.items():
        with naming(model.folder):
            found = of(model)
        yield label, found


def _evaluated(run: RunRecord) -> str:
    """A line on the original, the text and the machine."""
    with naming(run.folder):
        first = run.models[0].evaluations[0]
        words = [f"{first['model']['class']}, {first['model']['parameters']:,} parameters"]
        length = f" of {first['length']} tokens" if "length" in first else ""
        words.append(f"{first['windows']} windows{length}: {first['source']}")
        if "language" in first:
            loss = figure(first["language"]["original_loss"])
            words.append(f"original: loss {loss} nats per token, cache {size(first['softmax_bytes'])}")
        words += [str(run.machine[key]) for key in ("gpu", "processor") if run.machine.get(key)]
        return f"{run.folder.resolve().name}: {'; '.join(words)}"


def _verdict(model: ModelRecord) -> str:
    """Sentences on how close it is, what it saves and, if that was measured, whether it is faster."""
    first, speed = model.evaluations[0], _crossing(model)
    if model.section == "language":
        smaller = factor(first["softmax_bytes"], first["state_bytes"])
        said, work = verdict(model.lost, model.interval, smaller, first["length"]), "Decode"
    else:
        said, work = embedding_words(model.likeness), "A forward pass"
    if speed is None:
        return said
    where, longest = speed
    if where is None:
        return f"{said} {work} is not faster than the original's up to {longest:,} tokens."
    return f"{said} {work} is faster than the original's from {where:,} tokens on."


def _crossing(model: ModelRecord) -> tuple[int | None, int] | None:
    """The context from which on it is faster, in two digits, and the longest that was timed; None if none was."""
    if (speed := model.speed) is None:
        return None
    work = "decode" if model.section == "language" else "prefill"
    where = crossing(speed["original"][work], speed["model"][work])
    return None if where is None else int(float(f"{where:.2g}")), speed["model"][work][-1][0]


def _table(models: Models) -> Iterator[Part]:
    rows = dict(_each(models, _cells))
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    shown = table("model", *columns)
    for label, cells in rows.items():
        shown.add_row(label, *(cells.get(column, "") for column in columns))
    yield shown


def _cells(model: ModelRecord) -> dict[str, str]:
    first, speed = model.evaluations[0], _crossing(model)
    if model.section == "language":
        cells = {
            "verdict": level(worst_of(model.lost, model.interval)),
            "loss increase": _mean(model, "loss_increase"),
            "95 % interval": "none" if model.interval is None else " to ".join(map(figure, model.interval)),
            "KL": _mean(model, "kl"),
            "same likeliest token": f"{100 * model.figure('top1_agreement')['mean']:.1f} %",
            "cache": size(first["state_bytes"]),
            "compression factor": figure(first["softmax_bytes"] / first["state_bytes"]),
            "smaller from": _tokens(model.smaller_from),
        }
    else:
        cells = {
            "verdict": level(model.likeness, LIKENESS),
            "cosine of embeddings": _mean(model, "cosine"),
            "rank correlation of similarities": _mean(model, "spearman"),
            "state": size(first["state_bytes"]),
        }
    seconds = statistics.fmean(float(x.get("distill_seconds", 0)) for x in model.evaluations)
    cells["training"] = "none" if not seconds else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return cells if speed is None else cells | {"faster from": _tokens(speed[0])}


def _mean(model: ModelRecord, name: str) -> str:
    """The mean over seeds, with half their range if there are several."""
    mean, spread = model.figure(name).values()
    return figure(mean) if len(model.evaluations) == 1 else f"{figure(mean)} ± {figure(spread)}"


def _tokens(count: int | None) -> str:
    return "never" if count is None else f"{count:,} tokens"


def _charts(runs: Sequence[RunRecord], models: Models) -> list[Chart]:
    """The charts for which there is data."""
    labels = list(models)

    def rows(of: Callable[[ModelRecord], list[Row]]) -> list[Row]:
        return [{"model": label} | row for label, own in _each(models, of) for row in own]

    found, loss = [], rows(_loss)
    if loss:
        caches = {row.pop("original") for row in loss}
        found.append(charts.loss_against_bytes(loss, labels, caches=caches))
    for draw, of in (
        (charts.error_per_layer, _errors),
        (charts.bytes_per_layer, _bytes),
        (charts.training_losses, _training),
        (charts.speed, _speed),
    ):
        found += [draw(shown, labels)] if (shown := rows(of)) else []
    profiled = next((run for run in runs if run.profile), None)
    if profiled and profiled.profile and isinstance(profiled.recipe, Distillation):
        with naming(profiled.folder):
            found.append(charts.degrees_of_freedom(profiled.profile, profiled.recipe.lam))
    return found


def _loss(model: ModelRecord) -> list[Row]:
    if model.section != "language":
        return []
    first = model.evaluations[0]
    row = {"bytes": first["state_bytes"], "length": first["length"], "original": first["softmax_bytes"]}
    return [row | {"loss": model.lost} | charts.ends(model.interval)]


def _errors(model: ModelRecord) -> list[Row]:
    errors = model.evaluations[0]["layers"]
    return [
        {"layer": n, "name": layer.name, "error": float(errors[layer.name]["output_error"])}
        for n, layer in enumerate(model.plan.layers)
        if layer.name in errors
    ]


def _bytes(model: ModelRecord) -> list[Row]:
    """Layers kept softmax with their cache at the length of the windows."""
    length, itemsize, rows = model.evaluations[0].get("length", 0), model.itemsize, []
    for n, layer in enumerate(model.plan.layers):
        ranges = layer.ranges or {"softmax": "attention"}
        sizes = ", ".join(f"{what} {numbers}" for what, numbers in ranges.items() if numbers not in ("", "0"))
        rows.append({"layer": n, "name": layer.name, "bytes": layer.cache_bytes(length, itemsize), "sizes": sizes})
    return rows


def _training(model: ModelRecord) -> list[Row]:
    return [
        {"training": training, "step": step, "share": loss / curve[0][1]}
        for training, curve in model.training_curves()
        for step, loss in curve
    ]


def _speed(model: ModelRecord) -> list[Row]:
    works = {"prefill": "prefill" if model.section == "language" else "forward pass", "decode": "decode"}
    speed = model.speed or {"original": {}, "model": {}}
    return [
        {"work": work, "tokens": tokens, "ms": 1000 * seconds / (1 if name == "decode" else tokens)} | label
        for who, label in (("original", {"model": ORIGINAL}), ("model", {}))
        for name, work in works.items()
        for tokens, seconds in speed[who].get(name, [])
    ]
