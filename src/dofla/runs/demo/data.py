"""Text for the demo, made on the spot: the teacher's own samples, and documents that need long-range recall."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.integration.self_samples import token_windows
from dofla.runs.demo.documents import recall_documents

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
    """``windows`` windows [N, L], shuffled; training and validation are drawn from different random numbers."""
    count = max(1, round(RECALL_SHARE * windows))
    offset = _VALIDATION_SEEDS if split == "validation" else 0
    documents = recall_documents(round(count / _WINDOWS_PER_DOCUMENT) + 4, seed + offset)
    recall = token_windows(documents, tokenizer, length=length, windows=count, split="all").input_ids
    samples = token_windows(
        "self", tokenizer, length=length, windows=windows - len(recall), split=split, seed=seed, model=model
    ).input_ids
    mixed = torch.cat([samples, recall])
    order = torch.randperm(len(mixed), generator=torch.Generator().manual_seed(seed + offset))
    return TokenWindows(mixed[order], source=f"demo: own samples and recall documents ({split}, seed {seed})")
