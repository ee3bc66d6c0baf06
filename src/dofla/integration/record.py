"""Record: what is known of a converted model beside its plan: where it comes from, how it was trained, how it did.

It is saved with the model, and its model card is made from it. Nothing is computed from it.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dofla.data import Images, TokenWindows
from dofla.data.documents import dataset_name
from dofla.errors import DoflaError
from dofla.storage.fields import build
from dofla.storage.files import read_json, write_json

RECORD = "record.json"
_LARGEST = 300.0
"""Nats, whose exponential is still a number."""
_NAMELESS = re.compile(r"^tensor\b|texts in memory|and \d+ more \(")
"""In what is said of a text, where it does not say of which files that was."""


@dataclass
class Training:
    """One training of the model."""

    how: str  # what was trained, in a few words
    text: str  # on what
    steps: int  # of the optimizer
    command: str  # that does it again, in Python or on the command line
    positions: int | None = None  # of the text that it has seen; None for images
    weights: bool = False  # whether more than the feature maps was trained


@dataclass
class Figure:
    """One figure, of the model and, where it has one, of its original."""

    metric: str  # a short name without spaces
    label: str  # what a person reads, with the unit
    model: float
    original: float | None
    source: str  # of the text or task, and how much of it
    command: str  # that measures it again
    interval: list[float] | None = None  # both ends of one of 95 %, if it was measured


@dataclass
class Record:
    """All of it; trainings and figures in the order in which they came about, figures since the last training."""

    base_model: str = ""  # name on the hub of the model that was converted; empty if it has none
    license: dict[str, str] = field(default_factory=dict)  # of its card, with license_name and license_link if there
    model_class: str = ""
    dtype: str = ""
    datasets: list[str] = field(default_factory=list)  # names on the hub of what the model was trained on
    calibration: str = ""  # the text that its compressed cache was calibrated on, and how many tokens of it
    training: list[Training] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def add_distillation(
        self, how: str, windows: TokenWindows | Images, call: str, options: Mapping[str, Any], *, weights: bool = False
    ) -> None:
        """Take a distillation of these windows: ``how`` and ``weights`` as in :class:`Training`; ``call``, the function
        in Python up to its ``options``, is the command if the process carries out none of dofla's."""
        length = getattr(windows, "length", None)
        context = options["context"] or length  # said out loud: left out, it can mean another
        given = {**options, "context": context}
        command = command_line() or f"{call}, {', '.join(f'{name}={value!r}' for name, value in given.items())})"
        text = f"{without_folders(windows.source)}, {len(windows)} windows"
        text += f" of {length} tokens" if length else ""
        text += f", read anywhere among {context} positions" if context != length else ""
        self.training.append(Training(how, text, options["steps"], command, context, weights))
        self.figures = []  # of other weights
        dataset = dataset_name(windows.source)
        if dataset and dataset not in self.datasets:
            self.datasets.append(dataset)

    def add_calibration(self, made_by: Mapping[str, Any]) -> None:
        """Take a calibration, by its ``source`` and its number of ``tokens``."""
        if "source" in made_by:
            self.calibration = f"{without_folders(made_by['source'])}, {made_by['tokens']:,} tokens"

    def may_have_read(self, source: str) -> bool:
        """True unless it is known what the model was made from, and that this was other text than ``source``."""
        read = list(filter(None, [self.calibration, *(training.text for training in self.training)]))
        name = re.escape(Path(source).name.removesuffix("@train"))
        same = re.compile(rf"(^|[ /]){name}(@train)?( \(|,)")
        return not read or any(_NAMELESS.search(text) or same.search(text) for text in read)

    def add_figures(self, figures: Mapping[str, Any], command: str | None = None) -> None:
        """Take the figures of an evaluation; those of the same metric on the same text are replaced. DoflaError if
        there are none in it."""
        new = figures_of(figures, command or command_line() or "dofla.evaluate(model, tokens)")
        for figure in new:
            figure.source = without_folders(figure.source)
        taken = {(figure.metric, figure.label, figure.source) for figure in new}
        self.figures = [x for x in self.figures if (x.metric, x.label, x.source) not in taken] + new

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is empty is left out."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Record:
        """The reverse of :meth:`to_dict`; DoflaError naming ``where`` and the field if something is off."""
        return build(cls, data, where, strict=False)  # fields of a later version are passed over

    def save(self, path: str | Path) -> None:
        """Write it as JSON, replacing what was there."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read it; an empty one if there is none; DoflaError naming the file if it is damaged."""
        data = read_json(path, "a record of a converted model") if Path(path).exists() else {}
        return cls.from_dict(data, str(path))


def figures_of(record: Mapping[str, Any], command: str) -> list[Figure]:
    """The figures in a record of :func:`dofla.evaluate`, or of tasks. DoflaError if there are none in it, or a part of
    one is missing or of the wrong kind."""
    names = [field.name for field in fields(Figure) if field.name != "command"]
    try:
        rows = [dict(zip(names, row, strict=False)) for row in _rows(record)]
        # A rank correlation of a single pair is NaN, and the loss of a broken model is: nothing to put on a card.
        defined = [row for row in rows if not any(math.isnan(row.get(who) or 0.0) for who in ("model", "original"))]
        found = [build(Figure, row | {"command": command}, row["metric"]) for row in defined]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DoflaError(f"figures are not those of an evaluation ({error}): give what dofla.evaluate made") from error
    if not rows:
        raise DoflaError("figures hold none: give what dofla.evaluate, or `dofla evaluate --out`, made")
    return found


def _rows(record: Mapping[str, Any]) -> Iterator[tuple]:
    text = record.get("source", "")
    if "windows" in record:
        text += f", {record['windows']} windows" + (f" of {record['length']} tokens" if "length" in record else "")
    if language := record.get("language"):
        yield "loss", "next-token loss, nats", language["loss"], language["original_loss"], text
        perplexities = (math.exp(min(language[key], _LARGEST)) for key in ("loss", "original_loss"))
        yield "perplexity", "perplexity", *perplexities, text
        increase, interval = language["loss_increase"], language["loss_increase_interval"]
        yield "loss_increase", "loss increase, nats per token", increase, None, text, interval
        yield "kl", "KL divergence from the original, nats per token", language["kl"], None, text
        yield "agreement", "same likeliest next token, share", language["top1_agreement"], None, text
    if embeddings := record.get("embeddings"):
        yield "cosine", "cosine of embeddings with the original's", embeddings["cosine"], None, text
        yield "spearman", "rank correlation of similarities with the original's", embeddings["spearman"], None, text
    tasks = record.get("tasks", ())  # alone, or beside figures on a text
    for task in tasks.get("tasks", ()) if isinstance(tasks, Mapping) else tasks:
        asked = f"{task['task']}, {task['items']} items"
        for name, both in task["metrics"].items():
            label = "accuracy" if name == "acc" else name
            yield label.replace(", ", "-"), label, both["model"], both["original"], asked


def without_folders(source: str) -> str:
    """Text that names files, as others may see it: without the folders outside this one that they lie in."""
    return re.sub(r"(?<![^\s=])(?:~|\.{1,2})?/(?:[^/\s,]+/)*", "", source)


def command_line() -> str | None:
    """The command that this process carries out, if it is one of dofla's own; files without their folders."""
    program = Path(sys.argv[0])
    if program.stem != "dofla" and program.parent.name != "dofla":
        return None
    line = " ".join(["dofla", *(shlex.quote(without_folders(argument)) for argument in sys.argv[1:])])
    return line.encode("utf-8", "backslashreplace").decode()  # bytes that are no characters cannot be written
