"""Text for the demo: the teacher's own samples, and documents that need long-range recall."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.integration.self_samples import token_windows
from dofla.runs.demo import teacher_path
from dofla.runs.demo.documents import recall_documents
from dofla.storage.tensors import read_tensors

RECALL_SHARE = 0.2
"""Share of windows made of recall documents, about what the bundled teacher was trained on."""

_WINDOWS_PER_DOCUMENT = 0.75
_VALIDATION_SEEDS = 1_000_000


def demo_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: int,
    length: int,
    *,
    split: str = "train",
    seed: int = 0,
) -> TokenWindows:
    """``windows`` windows [N, L], shuffled; training and validation are drawn from different random numbers.

    Those that the demo itself asks for are bundled, for drawing them takes longer than all that is done with them; any
    others are drawn on the spot.
    """
    bundled = bundled_path(windows, length, split, seed)
    if bundled.exists() and Path(model.config._name_or_path) == teacher_path():
        tokens, _ = read_tensors(bundled, "install dofla again")
        return TokenWindows(tokens["input_ids"], source=_source(split, seed))
    return drawn_windows(model, tokenizer, windows, length, split=split, seed=seed)


def bundled_path(windows: int, length: int, split: str, seed: int) -> Path:
    """Where such windows are, if they are bundled: ``input_ids`` [N, L], 16-bit, as ``scripts/demo_windows.py`` has
    written them."""
    return Path(__file__).parent / "windows" / f"{split}-{windows}x{length}-seed{seed}.safetensors"


def drawn_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: int,
    length: int,
    *,
    split: str,
    seed: int,
) -> TokenWindows:
    """The windows of :func:`demo_windows` [N, L], always drawn and never the bundled ones."""
    count = max(1, round(RECALL_SHARE * windows))
    offset = _VALIDATION_SEEDS if split == "validation" else 0
    documents = recall_documents(round(count / _WINDOWS_PER_DOCUMENT) + 4, seed + offset)
    recall = token_windows(documents, tokenizer, length=length, windows=count, split="all").input_ids
    samples = token_windows(
        "self", tokenizer, length=length, windows=windows - len(recall), split=split, seed=seed, model=model
    ).input_ids
    mixed = torch.cat([samples, recall])
    order = torch.randperm(len(mixed), generator=torch.Generator().manual_seed(seed + offset))
    return TokenWindows(mixed[order], source=_source(split, seed))


def _source(split: str, seed: int) -> str:
    return f"demo: own samples and recall documents ({split}, seed {seed})"
