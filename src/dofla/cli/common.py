"""The common steps of several verbs: the text they are given, cut; what they have written; and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dofla.cli.verb import current_view

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dofla.data import TokenWindows


def windows_from(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Any],
    split: str = "train",
) -> TokenWindows:
    """Windows of a source for a model, with what ``--set`` says of them; and a line if there are fewer than asked."""
    from dofla.runs.opening import windows_of
    from dofla.runs.recipe import DataSpec

    cut = {name: value for name, value in settings.items() if name != "seed"}
    spec = DataSpec(source, split=split, **cut)
    found, asked = windows_of(spec, model, tokenizer, seed=settings.get("seed", 0), view=current_view()), spec.windows
    if asked is not None and len(found) < asked:
        part = {"train": "the training part of ", "validation": "the held-out part of "}.get(split, "")
        current_view().show(f"{len(found)} of {asked} windows asked: {part}{source} has no more")
    return found


def calibration_windows(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> TokenWindows:
    """Windows to calibrate on, cut as ``text`` says, by default as long as the model and the context allow."""
    from dofla.compression.directions import default_cut
    from dofla.integration.packages import DEMO
    from dofla.integration.positions import positions_of
    from dofla.runs.demo.data import DEMO_LENGTH

    most = positions_of(model), settings.get("context"), DEMO_LENGTH if source == DEMO else None
    return windows_from(source, model, tokenizer, {**default_cut(*most), **text})


def written(kind: str, path: Path) -> None:
    """A line on a file or folder that is new, with its size on disk."""
    from dofla.display import size

    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    current_view().show(f"\n{kind} written to {path} ({size(total)} on disk)")


def carried(given: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Words that give the next command what this one was given by ``--set``, of these names."""
    asked = ((name, given[name]) for name in names if name in given)
    texts = ((name, ",".join(value) if isinstance(value, (list, tuple)) else value) for name, value in asked)
    return [word for name, value in texts for word in ("--set", f"{name}={value}")]


def following(*words: object) -> None:
    """The next command, on one line whatever its length, so that it can be copied."""
    current_view().console.print(f"next: {shlex.join(['dofla', *map(str, words)])}", soft_wrap=True)
