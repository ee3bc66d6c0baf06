"""Record: what is known of a converted model beside its plan: where it comes from, how it was trained, how it did.

It is saved with the model, and its model card is made from it. Nothing is computed from it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dofla.data import Images, TokenWindows
from dofla.data.documents import dataset_name
from dofla.integration.figures import Figure, figures_of
from dofla.storage.fields import build
from dofla.storage.files import read_json, write_json

RECORD = "record.json"
_NAMELESS = re.compile(r"^tensor\b|texts in memory|and \d+ more \(")
"""In what is said of a text, where it does not say of which files that was."""


@dataclass
class Training:
    """One training of the model.

    Attributes:
        how, text: what was trained, and on what, in a few words.
        steps: of the optimizer.
        command: that does it again, in Python or on the command line.
        positions: of the text that it has seen; None for images.
        weights: whether more than the feature maps was trained.
    """

    how: str
    text: str
    steps: int
    command: str
    positions: int | None = None
    weights: bool = False


@dataclass
class Record:
    """All of it.

    Attributes:
        base_model: name on the hub of the model that was converted; empty if it has none.
        license: ``license`` of the base model's card, with ``license_name`` and ``license_link`` if it has them.
        model_class, dtype: of the model.
        datasets: names on the hub of what the model was trained on.
        calibration: the text that its compressed cache was calibrated on, and how many tokens of it.
        training, figures: in the order in which they came about; figures since the last training.
    """

    base_model: str = ""
    license: dict[str, str] = field(default_factory=dict)
    model_class: str = ""
    dtype: str = ""
    datasets: list[str] = field(default_factory=list)
    calibration: str = ""
    training: list[Training] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def add_distillation(
        self, how: str, windows: TokenWindows | Images, call: str, options: Mapping[str, Any], *, weights: bool = False
    ) -> None:
        """Take a distillation.

        Args:
            how: what was trained, in a few words.
            windows: that it read.
            call: the function in Python, up to its options: the command, if the process carries out none of dofla's.
            options: of the function, among them ``steps`` and ``context``.
            weights: whether more than the feature maps was trained.
        """
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
        """Take the figures of an evaluation; those of the same metric on the same text are replaced.

        Raises:
            DoflaError: there are none in it.
        """
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
        return (
            cls.from_dict(read_json(path, "a record of a converted model"), str(path)) if Path(path).exists() else cls()
        )


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
