"""What the report measures of a run: a few seconds per student, kept in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import TokenWindows, batches
from dofla.distillation import calibrate
from dofla.distillation.fidelity import attention_fidelity
from dofla.errors import DoflaError
from dofla.evaluation.probe import probe
from dofla.integration.checkpoint import apply_adapter
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import linearize, restore
from dofla.report.maps import attention_maps, moved, packed, sentence, token_texts
from dofla.report.runs import LOOK, RunRecord, StudentRecord
from dofla.report.speed import timings
from dofla.report.texts import side_by_side
from dofla.runs.demo.recall import Villagers
from dofla.runs.workshop import Workshop, machine
from dofla.storage.files import write_json

MOST = 8
"""Students of a run that are looked at closely: those that lost least."""

_POSITION_WINDOWS = 4
_RECALL_PROMPTS, _RECALL_LENGTHS = 8, (64, 128, 256, 512)

Progress = Callable[[int, int, str], None]


def passed_over(run: RunRecord, student: StudentRecord) -> str | None:
    """Why a student is not looked at, if it is not."""
    if not student.adapter.exists():
        return f"{student.adapter} is gone"
    if student not in run.best[:MOST]:
        return f"only the {MOST} students that lost least are looked at closely"
    return None


def missing(run: RunRecord) -> list[StudentRecord]:
    """The students that are still to be looked at."""
    return [x for x in run.best if not (x.folder / LOOK).exists() and passed_over(run, x) is None]


def look_closer(run: RunRecord, workshop: Workshop, progress: Progress) -> None:
    """Measure what is missing of a run and keep it there: ``report.json``, in its folder and in each student's.

    Args:
        run: whose students are looked at.
        workshop: of the same recipe and folder: the teacher, and held-out text.
        progress: called with (done, total, what is measured).

    Raises:
        DoflaError: a student's files are damaged or do not fit the model.
    """
    students, windows = missing(run), workshop.validation()
    for n, student in enumerate(students):
        with _opened(workshop.model, student, run, windows) as (model, before):
            parts = _Parts(lambda what, n=n: progress(n, len(students), what))
            if not (run.folder / LOOK).exists():
                write_json(run.folder / LOOK, _of_teacher(model, workshop, run, parts), sealed=True)
            record = {"before": before, **_of_student(model, workshop, run, parts)}
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
def _opened(
    model: PreTrainedModel, student: StudentRecord, run: RunRecord, windows: TokenWindows
) -> Iterator[tuple[PreTrainedModel, dict[str, Any] | None]]:
    """The student, and its layers' errors before it was trained."""
    linearize(model, student.plan, seed=student.seed)
    try:
        with evaluation_mode(model):
            before = _before(model, student, run, windows)
            apply_adapter(model, student.adapter)
            yield model, before
    finally:
        restore(model)


def _before(
    model: PreTrainedModel, student: StudentRecord, run: RunRecord, windows: TokenWindows
) -> dict[str, Any] | None:
    """Errors of the student just linearised, on the windows and rows that it is evaluated on. Maps that start from
    data take their scale from held-out text here, and not from the first batch of training."""
    starts = {spec.name: spec.start for spec in run.recipe.students}
    start = starts.get(student.name, "data")
    if not student.trained or start == "leverage":
        return None
    options = run.recipe.evaluate
    if start == "data":
        calibrate(model, [windows.batch(batches(windows, options.batch_size)[-1])])
    some = windows.take(options.fidelity_windows)
    return attention_fidelity(model, some, batch_size=options.batch_size, seed=student.seed)


def _of_teacher(model: PreTrainedModel, workshop: Workshop, run: RunRecord, parts: _Parts) -> dict[str, Any]:
    windows, tokenizer = workshop.validation(), workshop.tokenizer
    text = _longest_text(windows)
    pieces = token_texts(tokenizer, text.tolist())
    heads = sum(layer.heads for layer in run.profile.layers) if run.profile else 64
    start, end = sentence(windows, pieces, heads, 1 + min(MOST, len(run.students)))
    ids = text[start:end]
    record: dict[str, Any] = {"machine": machine(), "ids": ids.tolist(), "pieces": token_texts(tokenizer, ids.tolist())}
    record["longest"] = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    parts(record, "maps", lambda: packed(attention_maps(model, ids[None].to(model.device))[0]))
    return record


def _of_student(model: PreTrainedModel, workshop: Workshop, run: RunRecord, parts: _Parts) -> dict[str, Any]:
    windows, tokenizer = workshop.validation(), workshop.tokenizer
    ids = torch.tensor([run.record(LOOK)["ids"]], device=model.device)
    record: dict[str, Any] = {}
    parts(record, "maps", lambda: _compared(model, ids))
    if model.can_generate():
        options = run.recipe.evaluate
        parts(record, "texts", lambda: side_by_side(model, tokenizer, windows))
        some, size = windows.take(_POSITION_WINDOWS), {"batch_size": options.batch_size}
        parts(record, "positions", lambda: probe(model, tokenizer, some, wanted=["positions"], **size)["positions"])
        parts(record, "recall", lambda: _recall(model, workshop))
    parts(record, "speed", lambda: timings(model, _longest_text(windows)))
    return record


def _longest_text(windows: TokenWindows) -> Tensor:
    """The real tokens of the first window that has most of them."""
    if windows.attention_mask is None:
        return windows.input_ids[0]
    longest = windows.attention_mask.sum(dim=1).argmax()
    return windows.input_ids[longest][windows.attention_mask[longest].bool()]


def _compared(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    teacher, student = attention_maps(model, ids)
    return {"tokens": ids.shape[1], "layers": packed(student), "moved": moved(teacher, student)}


def _recall(model: PreTrainedModel, workshop: Workshop) -> dict[str, Any]:
    tokenizer, windows = workshop.tokenizer, workshop.validation()
    if tokenizer is None:
        raise DoflaError("the model has no tokenizer")
    # The bundled teacher knows one way of being told facts, and is asked one at a time.
    own = workshop.recipe.validation.source == "demo"
    lengths = [n for n in _RECALL_LENGTHS if n <= windows.length] or [windows.length]
    options = {"lengths": lengths, "count": _RECALL_PROMPTS * (2 if own else 1)}
    options["recall_text"] = Villagers(tokenizer) if own else None
    batch_size = workshop.recipe.evaluate.batch_size
    return probe(model, tokenizer, windows, wanted=["recall"], batch_size=batch_size, **options)["recall"]
