"""Measurements of a run for its report, kept in the run's folder: a second or two per student, and more if asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import TokenWindows, batches
from dofla.distillation import calibrate
from dofla.distillation.fidelity import attention_fidelity
from dofla.errors import DoflaError
from dofla.integration.checkpoint import apply_adapter
from dofla.integration.directions import measure_directions
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode
from dofla.integration.student import Student
from dofla.integration.surgery import convert, restore
from dofla.report.maps import attention_maps, moved, packed, sentence, token_texts
from dofla.report.runs import LOOK, RunRecord, StudentRecord
from dofla.report.speed import timings
from dofla.report.texts import side_by_side
from dofla.runs.workshop import Workshop, machine
from dofla.storage.files import write_json

MOST = 3
"""Students of a run that are looked at closely: those that lost least."""

_CONTINUED = {"prompts": 3, "prompt_tokens": 48, "new_tokens": 48}
_BEFORE_WINDOWS = 4

Progress = Callable[[int, int, str], None]


def passed_over(run: RunRecord, student: StudentRecord) -> str | None:
    """Why a student is not looked at, if it is not."""
    if not student.adapter.exists():
        return f"{student.adapter} is gone"
    if student not in run.best[:MOST]:
        return f"only the {MOST} students that lost least are looked at closely"
    return None


def missing(run: RunRecord, speed: bool = False) -> list[StudentRecord]:
    """The students that are still to be looked at, or, if their ``speed`` is wanted, to be timed."""
    return [x for x in run.best if passed_over(run, x) is None and _is_missing(x, speed)]


def _is_missing(student: StudentRecord, speed: bool) -> bool:
    return not (student.folder / LOOK).exists() or (speed and student.lacks("speed"))


def look_closer(run: RunRecord, workshop: Workshop, progress: Progress, *, speed: bool = False) -> None:
    """Measure what is missing of a run and keep it there: ``report.json``, in its folder and in each student's.

    Args:
        run: whose students are looked at.
        workshop: of the same recipe and folder: the teacher, and held-out text.
        progress: called with (done, total, what is measured).
        speed: time them as well, for ten seconds each.

    Raises:
        DoflaError: a student's files are damaged or do not fit the model.
    """
    students = missing(run, speed)
    for n, student in enumerate(students):
        parts = _Parts(partial(progress, n, len(students)))
        record = student.record(LOOK)
        with _linearized(workshop.model, student) as model:
            before = None if record else _before(model, student, run, workshop.validation())
            apply_adapter(model, student.adapter)
            if not (run.folder / LOOK).exists():
                write_json(run.folder / LOOK, _of_teacher(model, workshop, run, parts), sealed=True)
            record = record or {"before": before, **_of_student(model, workshop, run, parts)}
            if speed:
                parts(record, "speed", lambda: _timed(model, workshop.validation()))
            write_json(student.folder / LOOK, record, sealed=True)
    progress(len(students), len(students), "")


class _Parts:
    """Parts of a record, of which some may not be for this model."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell

    def __call__(self, record: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
        """Put ``make()`` into the record, or why it cannot be had."""
        self.tell(name)
        try:
            record[name] = make()
        except DoflaError as error:
            record.setdefault("left_out", {})[name] = str(error)


@contextmanager
def _linearized(model: PreTrainedModel, student: StudentRecord) -> Iterator[PreTrainedModel]:
    """The student as it was before it was trained."""
    convert(model, student.plan, seed=student.seed)
    try:
        with evaluation_mode(model):
            yield model
    finally:
        restore(model)


def _before(
    model: PreTrainedModel, student: StudentRecord, run: RunRecord, windows: TokenWindows
) -> dict[str, Any] | None:
    """Errors of the student just linearized, on the first of the windows that it is evaluated on. Maps that start from
    data take their scale from held-out text here, and tiers their directions, and not from training's."""
    starts = {spec.name: spec.start for spec in run.recipe.students}
    start = starts.get(student.name, "data")
    if not student.trained:
        return None
    options = run.recipe.evaluate
    some = windows.take(min(_BEFORE_WINDOWS, options.fidelity_windows))
    handle = Student.of(model)
    measure_directions(handle, some, batch_size=options.batch_size)
    if start == "data":
        calibrate(handle, [windows.batch(batches(windows, options.batch_size)[-1])])
    found = attention_fidelity(handle, some, batch_size=options.batch_size, seed=student.seed)
    return {name: asdict(layer) for name, layer in found.items()}


def _of_teacher(model: PreTrainedModel, workshop: Workshop, run: RunRecord, parts: _Parts) -> dict[str, Any]:
    windows, tokenizer = workshop.validation(), workshop.tokenizer
    text = _longest_text(windows)
    pieces = token_texts(tokenizer, text.tolist())
    heads = sum(layer.heads for layer in run.profile.layers) if run.profile else 64
    start, end = sentence(windows, pieces, heads, 1 + min(MOST, len(run.students)))
    ids = text[start:end]
    record: dict[str, Any] = {"ids": ids.tolist(), "pieces": token_texts(tokenizer, ids.tolist())}
    record["longest"] = positions_of(model)
    parts(record, "maps", lambda: packed(attention_maps(model, ids[None].to(model.device))[0]))
    return record


def _of_student(model: PreTrainedModel, workshop: Workshop, run: RunRecord, parts: _Parts) -> dict[str, Any]:
    ids = torch.tensor([run.record(LOOK)["ids"]], device=model.device)
    record: dict[str, Any] = {}
    parts(record, "maps", lambda: _compared(model, ids))
    if model.can_generate():
        parts(record, "texts", lambda: side_by_side(model, workshop.tokenizer, workshop.prompts(**_CONTINUED)))
    return record


def _timed(model: PreTrainedModel, windows: TokenWindows) -> dict[str, Any]:
    return timings(model, _longest_text(windows)) | {"machine": machine()}


def _longest_text(windows: TokenWindows) -> Tensor:
    """The real tokens of the first window that has most of them."""
    if windows.attention_mask is None:
        return windows.input_ids[0]
    longest = windows.attention_mask.sum(dim=1).argmax()
    return windows.input_ids[longest][windows.attention_mask[longest].bool()]


def _compared(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    teacher, student = attention_maps(model, ids)
    return {"tokens": ids.shape[1], "layers": packed(student), "moved": moved(teacher, student)}
