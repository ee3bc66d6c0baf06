"""From a run's records to the data of its page: plain numbers and words, as a browser wants them."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dofla.plans.plan import LayerPlan
from dofla.profiles.profile import Profile
from dofla.report.look import passed_over
from dofla.report.maps import LEVELS
from dofla.report.recall import by_distance, forgets_from
from dofla.report.runs import LOOK, RunRecord, StudentRecord, naming
from dofla.report.speed import crossing
from dofla.report.verdict import Figures, verdict
from dofla.runs.demo import teacher_path
from dofla.runs.recipe import Recipe
from dofla.runs.run import layer_mean, over_seeds
from dofla.storage.files import read_json

_CURVE_POINTS = 80


def run_data(run: RunRecord) -> dict[str, Any]:
    """Everything the page shows of a run; ``students`` in the recipe's order, ``best`` the place of the best.

    Raises:
        DoflaError: naming the folder whose records hold something else than they should.
    """
    with naming(run.folder):
        data = _run_data(run)
        json.dumps(data, allow_nan=False)  # the page holds it so
        return data


def _run_data(run: RunRecord) -> dict[str, Any]:
    look, first, students = run.record(LOOK), run.students[0], []
    with naming(first.folder):
        evaluation = first.evaluations[0]
        model = {"title": model_title(run.recipe.model), **evaluation["model"]}
        text = {"source": evaluation["source"], "windows": evaluation["windows"], "length": evaluation.get("length")}
    for student in run.students:
        with naming(student.folder):
            students.append(_student(run, student, look))
    where = shlex.quote(str(run.folder))
    return {
        "name": run.folder.resolve().name,
        "folder": where,
        "model": model,
        "language": first.is_language_model,
        "budget": run.recipe.budget,
        **text,
        "longest": look.get("longest"),
        "profile": None if run.profile is None else degrees_of_freedom(run.profile, run.recipe.lam),
        "text": _text(look),
        "students": students,
        "best": run.students.index(run.best[0]),
        "recipe": run.text,
        "machine": run.machine,
        "notes": run.unread,
        "commands": _commands(run, where),
    }


def degrees_of_freedom(profile: Profile, lam: float) -> dict[str, Any]:
    """The degrees of freedom at the tolerance ``lam``, by layer and KV head, and their standard errors, None where
    unknown."""
    values = [[_short(n, 4) for n in row] for row in profile.dof(lam)]
    errors = [[_short(n, 2) for n in row] for row in profile.dof_errors(lam)]
    skipped = [{"name": x.name, "reason": x.reason} for x in profile.skipped]
    names = [x.name for x in profile.layers]
    return {"lambda": lam, "names": names, "values": values, "errors": errors, "skipped": skipped}


def model_title(name: str) -> str:
    """A model's name without the path to it."""
    if name == "demo" or Path(name) == teacher_path():
        return "The bundled model"
    path = Path(name.removeprefix("package:"))
    return path.parent.name if path.name == "model" else path.name


def layers_of(layers: Sequence[LayerPlan], itemsize: int) -> list[dict[str, Any]]:
    """The layers as the page shows them: sizes (features, window, sinks) and tiers (tokens, bits) of the KV heads, None
    for softmax layers; whether the last tier retains heavy hitters; the bytes of the layer and their parts (features,
    window and sinks, and (bits, bytes) of tiers); and the bytes of each KV head."""
    found = []
    for layer in layers:
        features, exact, coded = layer.bytes_by_kind(itemsize)
        found.append(
            {
                "name": layer.name,
                "sizes": None if layer.keep_softmax else layer.sizes,
                "tiers": None if layer.keep_softmax else layer.coded_per_head,
                "kept": any(layer.heavy_hitters_per_head),
                "map": layer.feature_map,
                "tokens": layer.token_dtype,
                "bytes": layer.state_bytes(itemsize),
                "parts": [features, exact, list(coded.items())],
                "heads": _head_bytes(layer, itemsize),
            }
        )
    return found


def _head_bytes(layer: LayerPlan, itemsize: int) -> list[int]:
    """Bytes of each KV head."""
    heads = zip(layer.sizes, layer.tiers_per_head, layer.heavy_hitters_per_head, strict=True)
    return [
        replace(
            layer, kv_heads=1, features=features, window=window, sinks=sinks, tiers=tiers, heavy_hitters=kept
        ).state_bytes(itemsize)
        for (features, window, sinks), tiers, kept in heads
    ]


def _student(run: RunRecord, student: StudentRecord, look: dict[str, Any]) -> dict[str, Any]:
    first, own = student.evaluations[0], student.record(LOOK)
    probed, tasks = student.record("probe.json"), _tasks(student.record("tasks.json"))
    per_token, itemsize = _per_token(student)
    kept = student.plan.kept_softmax_bytes(1, torch.int8) * itemsize
    state = sum(layer.state_bytes(itemsize) for layer in student.plan.layers)
    recall = probed.get("recall") or own.get("recall")
    recalled = by_distance(recall) if recall else []
    speed = own.get("speed")
    maps = own.get("maps")
    crossings = {what: _crossing(speed, what) for what in ("read", "write")}
    language = student.is_language_model
    data: dict[str, Any] = {
        "name": student.name,
        "word": _word(student),
        "seeds": [x.get("seed", 0) for x in student.evaluations],
        "quality": _quality(student),
        "lost": _short(student.lost),
        "state_bytes": state,
        "kept_bytes": kept,
        "cache_bytes": per_token,
        "layers": _layers(student, own, itemsize),
        "losses": _losses(student.folder / "distill"),
        "end_to_end": _losses(student.folder / "end_to_end"),
        "seconds": first.get("distill_seconds"),
        "maps": maps if maps and maps["tokens"] == len(look.get("ids", ())) else None,
        "texts": own.get("texts"),
        "agreed": _agreed(probed, own),
        "positions": probed.get("positions") or own.get("positions"),
        "recall": {"text": recall["text"], "points": recalled} if recall and recalled else None,
        "tasks": tasks,
        "speed": speed,
        "crossings": crossings,
        "left_out": own.get("left_out", {}) if own else _all_left_out(run, student),
        "commands": _student_commands(run, student),
    }
    figures = Figures(
        language=language,
        increase=student.lost,
        interval=_interval(student),
        length=first["length"] if language else 0,
        state_bytes=state,
        token_bytes=per_token - kept,
        kept_bytes=kept,
        longest=look.get("longest") if language else _timed_to(speed),
        faster_from=crossings["write" if language else "read"],
        timed=speed is not None,
        recall=_recall(recalled),
        forgets_from=forgets_from(recalled),
        tasks=None if tasks is None else (tasks["teacher"], tasks["student"]),
    )
    return data | {"smaller_from": figures.smaller_from, "verdict": verdict(figures)}


def _word(student: StudentRecord) -> str:
    """The page's word for the model: "student" if it is trained or has features, which are for training, otherwise
    "compressed"."""
    features = any(sum(x.features_per_head) for x in student.plan.layers if not x.keep_softmax)
    return "student" if features or student.trained else "compressed"


def _all_left_out(run: RunRecord, student: StudentRecord) -> dict[str, str]:
    """The reason why a student was not measured, by part of the page; empty if nobody has done it yet."""
    why = passed_over(run, student)
    return {} if why is None else dict.fromkeys(("maps", "texts", "positions", "recall", "speed"), why)


def _per_token(student: StudentRecord) -> tuple[int, int]:
    """Bytes of a token in the original's cache, and of a number in it, as the evaluation reckoned them: profiles of
    older runs do not name the model's dtype."""
    first, numbers = student.evaluations[0], student.plan.softmax_bytes(1, torch.int8)
    per_token = first["softmax_bytes"] // first["length"] if "length" in first else 4 * numbers
    return per_token, per_token // numbers


def _quality(student: StudentRecord) -> dict[str, Any]:
    """Means over seeds, with half their range."""
    section = "language" if student.is_language_model else "embeddings"
    runs = [x[section] for x in student.evaluations]
    quality: dict[str, Any] = {
        key: _mean([x[key] for x in runs]) for key, value in runs[0].items() if isinstance(value, float)
    }
    for key in ("kl", "output_error"):
        quality[f"attention_{key}"] = _mean([layer_mean(x, key) for x in student.evaluations])
    if student.is_language_model:
        quality["interval"] = [_short(end) for end in _interval(student)]
    return quality


def _interval(student: StudentRecord) -> list[float]:
    """The interval for the verdict: that of the loss increase, mean over seeds; for an encoder, the smaller of cosine
    and rank correlation twice."""
    if student.is_language_model:
        runs = [x["language"]["loss_increase_interval"] for x in student.evaluations]
        return [statistics.fmean(ends) for ends in zip(*runs, strict=True)]
    runs = [x["embeddings"] for x in student.evaluations]
    return 2 * [min(statistics.fmean(x[key] for x in runs) for key in ("cosine", "spearman"))]


def _mean(values: list[float]) -> dict[str, Any]:
    return {name: _short(value) for name, value in over_seeds(values).items()}


def _layers(student: StudentRecord, own: dict[str, Any], itemsize: int) -> list[dict[str, Any]]:
    layers = layers_of(student.plan.layers, itemsize)
    after, before = student.evaluations[0]["layers"], own.get("before") or {}
    for layer in layers:
        for when, found in (("before", before), ("after", after)):
            errors = found.get(layer["name"])
            layer[when] = {key: _short(errors[key]) for key in ("kl", "output_error")} if errors else None
    return layers


def _losses(folder: Path) -> dict[str, Any] | None:
    """The curve of each layer, in bins of steps."""
    if not (folder / "losses.json").exists():
        return None
    record = read_json(folder / "losses.json", "losses")
    steps = min((len(values) for values in record["layers"].values()), default=0)
    if not steps:
        return None
    edges = sorted({round(n * steps / min(steps, _CURVE_POINTS)) for n in range(min(steps, _CURVE_POINTS) + 1)})
    bins = list(pairwise(edges))
    curves = {
        name: [_short(statistics.fmean(values[a:b]), 4) for a, b in bins] for name, values in record["layers"].items()
    }
    return {"loss": record["loss"], "steps": [(a + b + 1) / 2 for a, b in bins], "curves": curves}


def _agreed(probed: dict[str, Any], own: dict[str, Any]) -> dict[str, Any] | None:
    """The share of the tokens of greedy continuations that stand before the first that differs; and the number of
    prompts."""
    if "generation" in probed:
        figures = probed["generation"]
        return {"share": figures["agreed_tokens"] / figures["new_tokens"], "prompts": figures["prompts"]}
    texts = own.get("texts")
    if not texts:
        return None
    written = sum(max(len(x["teacher"]), len(x["student"])) for x in texts)
    return {"share": sum(x["agree"] for x in texts) / max(written, 1), "prompts": len(texts)}


def _recall(points: Sequence[dict[str, Any]]) -> tuple[int, float, float] | None:
    """The largest distance, and the share of right answers over all questions, of both models."""
    if not points:
        return None
    total = sum(x["n"] for x in points)
    shares = (sum(x[who] * x["n"] for x in points) / total for who in ("teacher", "student"))
    return points[-1]["distance"], *shares


def _tasks(record: dict[str, Any]) -> dict[str, Any] | None:
    tasks = record.get("tasks")
    if isinstance(tasks, dict):  # of dofla evaluate, which writes other figures as well
        tasks = tasks.get("tasks")
    if not tasks:
        return None
    rows = [{**x, **x["metrics"]["acc"]} for x in tasks if "acc" in x["metrics"]]
    if not rows:
        return None
    return {"rows": rows, **{who: statistics.fmean(row[who] for row in rows) for who in ("teacher", "student")}}


def _timed_to(speed: dict[str, Any] | None) -> int | None:
    """The longest text that was read against the clock."""
    return speed["student"]["read"][-1][0] if speed else None


def _crossing(speed: dict[str, Any] | None, what: str) -> float | None:
    both = [(speed or {}).get(who, {}).get(what) for who in ("teacher", "student")]
    return crossing(*both) if all(both) else None


def _text(look: dict[str, Any]) -> dict[str, Any] | None:
    if "maps" not in look:
        return None
    return {"pieces": look["pieces"], "levels": LEVELS, "maps": look["maps"]}


def _source(recipe: Recipe) -> str:
    source = recipe.validation.source
    return shlex.quote(source if isinstance(source, str) else source[0])


def _student_commands(run: RunRecord, student: StudentRecord) -> dict[str, str]:
    """The commands that add to the page, and the one that uses the student."""
    adapter, folder = (shlex.quote(str(path)) for path in (student.adapter, student.folder))
    return {
        "tasks": f"dofla evaluate {adapter} --tasks piqa,arc_easy --out {folder}/tasks.json",
        "probe": f"dofla probe {adapter} --data {_source(run.recipe)} --out {folder}/probe.json",
        "generate": f'dofla generate {adapter} --prompt "Once upon a time"',
    }


def _commands(run: RunRecord, where: str) -> dict[str, str]:
    is_run = (run.folder / "recipe.yaml").exists()
    again = {"again": f"dofla run {where}/recipe.yaml --out {where}-again"} if is_run else {}
    return again | {"report": f"dofla report {where}", "speed": f"dofla report {where} --speed"}


def _short(value: float, digits: int = 5) -> float | None:
    """Few digits; None for what has no end, as the divergence of a student that sees nothing far."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) and abs(value) < 1e4 else None
