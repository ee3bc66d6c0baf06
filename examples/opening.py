"""The beginning of all examples: a compressed model, and its tokenizer."""

from __future__ import annotations

from random import Random

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.data import read_documents
from dofla.runs import opening


def open_converted(name: str = "demo") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A compressed model, by folder or name on the hub; ``demo``: the bundled one, compressed in some seconds."""
    if name == "demo":
        model, tokenizer, _ = dofla.demo()
        windows = dofla.token_windows("sample", tokenizer, length=256, windows=8)
        dofla.compress(model, windows, size="128KiB", head_budgets="even")
        return model, tokenizer
    return opening.open_converted(name)


def some_text(tokenizer: PreTrainedTokenizerBase, windows: int, length: int = 256, seed: int = 1):
    """Bundled text, from a random place on, as tokens [windows, length]; use your own."""
    documents = list(read_documents("sample"))
    start = Random(seed).randrange(len(documents))
    text = " ".join((documents[start:] + documents[:start])[: windows * length // 64])
    return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : windows * length].view(windows, length)
