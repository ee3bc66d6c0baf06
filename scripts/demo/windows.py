"""Draws the bundled windows that the demo is trained on and evaluated with: run it when the bundled model changes.

python scripts/demo/windows.py
"""

import torch
from documents import recall_documents
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.integration.self_samples import token_windows
from dofla.runs.demo import WINDOWS
from dofla.runs.opening import open_original
from dofla.storage.tensors import write_tensors

RECALL_SHARE = 0.2
"""Share of windows made of recall documents, about what the bundled model was trained on."""
SIZES, LENGTH = {"train": 256, "validation": 48}, 512

_WINDOWS_PER_DOCUMENT = 0.75
_VALIDATION_SEEDS = 1_000_000


def drawn_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: int,
    length: int,
    *,
    split: str = "train",
    seed: int = 0,
) -> TokenWindows:
    """Windows [N, L], shuffled; training and validation are drawn from different random numbers."""
    count = max(1, round(RECALL_SHARE * windows))
    offset = _VALIDATION_SEEDS if split == "validation" else 0
    documents = recall_documents(round(count / _WINDOWS_PER_DOCUMENT) + 4, seed + offset)
    recall = token_windows(documents, tokenizer, length=length, windows=count, split="all").input_ids
    samples = token_windows(
        "self", tokenizer, length=length, windows=windows - len(recall), split=split, seed=seed, model=model
    ).input_ids
    mixed = torch.cat([samples, recall])
    return TokenWindows(mixed[torch.randperm(len(mixed), generator=torch.Generator().manual_seed(seed + offset))])


def main() -> None:
    model, tokenizer = open_original("demo")
    for split, windows in SIZES.items():
        drawn = drawn_windows(model, tokenizer, windows, LENGTH, split=split)
        path = WINDOWS / f"{split}.safetensors"
        write_tensors(path, {"input_ids": drawn.input_ids.to(torch.int16)})
        print(path)


if __name__ == "__main__":
    main()
