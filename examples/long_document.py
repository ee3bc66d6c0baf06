"""Read a long document once, keep its state, and put many questions to it, each at the cost of the question alone.

    python examples/long_document.py [MODEL]

The state of a compressed model has the same size after ten tokens and after ten thousand, so it is a small file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from opening import open_converted, some_text

import dofla
from dofla.integration.cache import CACHE_ARGUMENT


def main(name: str = "demo") -> list[str]:
    model, tokenizer = open_converted(name)
    document, answers = some_text(tokenizer, windows=1, length=1500), []
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "document.safetensors"
        dofla.serving.save_state(dofla.serving.read_prompt(model, document), document, state, model)
        print(f"{document.shape[1]} tokens read; their state takes {state.stat().st_size / 1024:.0f} KiB")
        for question in ("Who came to help? It was the", "Who laughed? It was the", "Then the"):
            prompt, cache = dofla.serving.load_state(state, model)
            ids = torch.cat([prompt, tokenizer(" " + question, return_tensors="pt")["input_ids"]], dim=1)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache}, max_new_tokens=8)
            answers.append(tokenizer.decode(out[0, ids.shape[1] :]))
            print(f"{question} ...{answers[-1]}")
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
