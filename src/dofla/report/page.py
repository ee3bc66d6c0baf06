"""From a run's records to the data of its page: plain numbers and words, as a browser wants them."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dofla.plans.head_budgets import flat_head_budgets
from dofla.plans.plan import LayerPlan
from dofla.report.look import passed_over
from dofla.report.maps import LEVELS
from dofla.report.recall import by_distance, forgets_from
from dofla.report.runs import LOOK, RunRecord, StudentRecord, naming
from dofla.report.speed import crossing
from dofla.report.tables import slider_tables
from dofla.report.verdict import Figures, verdict
from dofla.runs.demo import teacher_path
from dofla.runs.recipe import Recipe
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
        "seeds": sorted({x["seed"] for student in run.students for x in student.evaluations if "seed" in x}),
        **text,
        "longest": look.get("longest"),
        "sliders": None if run.profile is None else sliders(run, where),
        "text": _text(look),
        "students": students,
        "best": run.students.index(run.best[0]),
        "recipe": run.text,
        "machine": run.machine,
        "notes": run.unread,
        "commands": _commands(run, where),
    }


def sliders(run: RunRecord, where: str) -> dict[str, Any]:
    """Tables for the sliders of a run, and the command that they make."""
    curves = {f"{where}/{file.name}": found for file, found in run.curves.items()}
    head_budgets = [share for x in run.students for share in flat_head_budgets(x.plan.made_by.get("head_budgets", {}))]
    known = {"budget": run.recipe.budget, "lam": run.recipe.lam, "largest_share": max(head_budgets, default=1.0)}
    known |= {"contexts": [x.plan.context for x in run.students]}
    known |= {"full_heads": any("retrieval_heads" in x.plan.made_by for x in run.students)}
    tables = slider_tables(run.profile, curves, **known)
    tables |= {"model": shlex.quote(run.recipe.model), "profile": f"{where}/profile"}
    return tables | {"length": run.students[0].evaluations[0].get("length")}


def model_title(name: str) -> str:
    """A model's name without the path to it."""
    if name == "demo" or Path(name) == teacher_path():
        return "The bundled teacher"
    path = Path(name.removeprefix("package:"))
    return path.parent.name if path.name == "model" else path.name


def layers_of(layers: Sequence[LayerPlan], itemsize: int) -> list[dict[str, Any]]:
    """What each layer is: sizes (features, window, sinks) and stages (tokens, bits) of its KV heads, None where it is
    softmax; whether the last stage keeps what draws attention; its bytes, and the parts of them: of features, of window
    and sinks, and (bits, bytes) of stages."""
    found = []
    for layer in layers:
        features, exact, coded = layer.bytes_by_kind(itemsize)
        found.append(
            {
                "name": layer.name,
                "sizes": None if layer.keep_softmax else layer.sizes,
                "stages": None if layer.keep_softmax else layer.coded_per_head,
                "kept": any(layer.kept_per_head),
                "map": layer.feature_map,
                "tokens": layer.token_dtype,
                "bytes": layer.state_bytes(itemsize),
                "parts": [features, exact, list(coded.items())],
            }
        )
    return found


def _student(run: RunRecord, student: StudentRecord, look: dict[str, Any]) -> dict[str, Any]:
    first, own = student.evaluations[0], student.record(LOOK)
    probed, tasks = student.record("probe.json"), student.record("tasks.json")
    per_token, itemsize = _per_token(student)
    kept = student.plan.kept_softmax_bytes(1, torch.int8) * itemsize
    state = sum(layer.state_bytes(itemsize) for layer in student.plan.layers)
    recall = probed.get("recall") or own.get("recall")
    recalled = by_distance(recall) if recall else []
    speed = own.get("speed")
    maps = own.get("maps")
    crossings = {what: _crossing(speed, what) for what in ("read", "write")}
    data = {
        "name": student.name,
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
        "made_by": student.plan.made_by,
        "context": student.plan.context,
        "maps": maps if maps and maps["tokens"] == len(look.get("ids", ())) else None,
        "texts": own.get("texts"),
        "agreed": _agreed(probed, own),
        "positions": probed.get("positions") or own.get("positions"),
        "recall": {"text": recall["text"], "points": recalled} if recalled else None,
        "tasks": _tasks(tasks),
        "speed": speed,
        "crossings": crossings,
        "left_out": own.get("left_out", {}) if own else _all_left_out(run, student),
        "commands": _student_commands(run, student),
    }
    quality = data["quality"]
    figures = Figures(
        language=student.is_language_model,
        worst=quality["worst"],
        mean=student.lost,
        state_bytes=state,
        token_bytes=per_token - kept,
        longest=look.get("longest") if student.is_language_model else _timed_to(speed),
        faster_from=crossings["write" if student.is_language_model else "read"],
        timed=speed is not None,
        forgets_from=forgets_from(recalled),
        learns=any(sum(layer.features_per_head) for layer in student.plan.layers if not layer.keep_softmax),
    )
    return data | {"smaller_from": figures.smaller_from, "verdict": verdict(figures)}


def _all_left_out(run: RunRecord, student: StudentRecord) -> dict[str, str]:
    """By part of the page, why a student was not looked at; nothing if it is only that nobody has done it yet."""
    why = passed_over(run, student)
    return {} if why is None else dict.fromkeys(("maps", "texts", "positions", "recall", "speed"), why)


def _per_token(student: StudentRecord) -> tuple[int, int]:
    """Bytes of a token in the original's cache, and of a number in it, as the evaluation reckoned them: profiles of
    older runs do not name the model's dtype."""
    first, numbers = student.evaluations[0], student.plan.softmax_bytes(1, torch.int8)
    per_token = first["softmax_bytes"] // first["length"] if "length" in first else 4 * numbers
    return per_token, per_token // numbers


def _quality(student: StudentRecord) -> dict[str, Any]:
    """Means over seeds, with half their range; ``worst`` is what the verdict goes by."""
    section = "language" if student.is_language_model else "embeddings"
    runs = [x[section] for x in student.evaluations]
    quality: dict[str, Any] = {
        key: _mean([x[key] for x in runs]) for key, value in runs[0].items() if isinstance(value, float)
    }
    for key in ("kl", "output_error"):
        found = [statistics.fmean(layer[key] for layer in x["layers"].values()) for x in student.evaluations]
        quality[f"attention_{key}"] = _mean(found)
    if student.is_language_model:
        low, high = (statistics.fmean(x["gap_interval"][n] for x in runs) for n in (0, 1))
        quality |= {"interval": [_short(low), _short(high)], "worst": high}
    else:
        quality["worst"] = min(statistics.fmean(x[key] for x in runs) for key in ("cosine", "spearman"))
    return quality


def _mean(values: list[float]) -> dict[str, Any]:
    return {"mean": _short(statistics.fmean(values)), "spread": _short((max(values) - min(values)) / 2)}


def _layers(student: StudentRecord, own: dict[str, Any], itemsize: int) -> list[dict[str, Any]]:
    layers = layers_of(student.plan.layers, itemsize)
    after, before = student.evaluations[0]["layers"], own.get("before") or {}
    for layer in layers:
        for when, found in (("before", before), ("after", after)):
            errors = found.get(layer["name"])
            layer[when] = errors and {key: _short(errors[key]) for key in ("kl", "output_error")}
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
    """For how many tokens the greedy continuations stay the same."""
    if "generation" in probed:
        figures = probed["generation"]
        return {"tokens": figures["agreed_tokens"], "of": figures["new_tokens"], "prompts": figures["prompts"]}
    texts = own.get("texts")
    if not texts:
        return None
    most = max(max(len(x["teacher"]), len(x["student"])) for x in texts)
    return {"tokens": statistics.fmean(x["agree"] for x in texts), "of": most, "prompts": len(texts)}


def _tasks(record: dict[str, Any]) -> dict[str, Any] | None:
    tasks = record.get("tasks")
    if isinstance(tasks, dict):  # of dofla evaluate, which writes other figures as well
        tasks = tasks.get("tasks")
    if not tasks:
        return None
    rows = [{"task": x["task"], "items": x["items"], **x["acc"]} for x in tasks]
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
    """What adds to the page, and what uses the student."""
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
