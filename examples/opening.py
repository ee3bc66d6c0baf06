"""The beginning of all examples: a compressed model, and its tokenizer."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.runs import teacher
from dofla.runs.demo.documents import recall_documents


def open_student(name: str = "demo") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A compressed model, by folder or name on the hub; ``demo``: the bundled one, compressed in some seconds."""
    if name == "demo":
        model, tokenizer, _ = dofla.demo()
        windows = dofla.token_windows("sample", tokenizer, length=256, windows=8)
        dofla.compress(model, windows, size="128KiB", head_budgets="even")
        return model, tokenizer
    return teacher.open_student(name)


def some_text(tokenizer: PreTrainedTokenizerBase, windows: int, length: int = 256, seed: int = 1):
    """Text made on the spot, as tokens [windows, length]; use your own."""
    text = " ".join(recall_documents(windows * length // 64, seed=seed))
    return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : windows * length].view(windows, length)
