"""Windows of the text that a verb's ``--data`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.cli.verb import current_view
from dofla.data import TokenWindows
from dofla.runs.opening import windows_of
from dofla.runs.recipe import DataSpec


def windows_from(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Any],
    split: str = "train",
) -> TokenWindows:
    """Windows of a source for a model, with what ``--set`` says of them."""
    cut = {name: value for name, value in settings.items() if name != "seed"}
    spec = DataSpec(source, split=split, **cut)
    return windows_of(spec, model, tokenizer, seed=settings.get("seed", 0), view=current_view())
