"""Read a long document once, keep its state, and put many questions to it, each at the cost of the question alone.

    python examples/long_document.py

The state of a linearised model has the same size after ten tokens and after ten thousand, so it is a small file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import dofla
from dofla.demo.documents import recall_documents
from dofla.teacher import load_teacher

model, tokenizer = load_teacher("demo")
words = tokenizer(" ".join(recall_documents(16, seed=1)), return_tensors="pt", verbose=False)["input_ids"]

plan = dofla.allocate(dofla.profile(model, words[:, :1024].view(4, 256), samples=256), budget=64)
dofla.linearize(model, plan)
dofla.distill(model, words[:, :2048].view(8, 256), steps=20, rows=64)

state = Path(tempfile.mkdtemp()) / "document.safetensors"
document = words[:, :1500]
dofla.save_state(dofla.read_prompt(model, document), document, state, model)
print(f"{document.shape[1]} tokens read; their state takes {state.stat().st_size / 1024:.0f} KiB")

for question in ("Who came to help? It was the", "Who laughed? It was the", "Then the"):
    prompt, cache = dofla.load_state(state, model)
    ids = torch.cat([prompt, tokenizer(" " + question, return_tensors="pt")["input_ids"]], dim=1)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=8)
    print(f"{question} ...{tokenizer.decode(out[0, ids.shape[1] :])}")
