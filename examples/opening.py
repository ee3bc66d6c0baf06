"""What the examples begin with: a student, and its tokenizer."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.runs import teacher
from dofla.runs.demo.documents import recall_documents


def open_student(name: str = "demo") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A student by its folder or its name on the hub; ``demo``: one of the bundled teacher, made in some seconds."""
    if name == "demo":
        model, tokenizer = teacher.load_teacher("demo")
        dofla.linearize(model)
        dofla.distill(model, some_text(tokenizer, windows=16), steps=8, rows=32)
        return model, tokenizer
    return teacher.open_student(name)


def some_text(tokenizer: PreTrainedTokenizerBase, windows: int, length: int = 256, seed: int = 1):
    """Text made on the spot, as tokens [windows, length]; use your own."""
    text = " ".join(recall_documents(windows * length // 64, seed=seed))
    return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : windows * length].view(windows, length)
