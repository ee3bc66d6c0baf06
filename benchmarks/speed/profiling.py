"""Seconds to profile a GPT-2-small-shaped model: 12 layers, 12 heads, J = 1,024, 64 sequences of 1,024 tokens.

    python benchmarks/speed/profiling.py

The paper reports 105 s for its Algorithm 1 on GPT-2 (Table 12), on a GPU. Also printed: the same forward passes alone,
as the model computes them with softmax attention, so that what measuring adds can be read as a ratio.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import torch
import typer
from transformers import GPT2Config, GPT2Model

import dofla

PAPER_SECONDS = 105


def main(
    dtype: Annotated[list[str] | None, typer.Option(help="Model dtypes to time.")] = None,
    sequences: int = 64,
    length: int = 1024,
    samples: int = 1024,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    torch.manual_seed(0)
    rows = []
    for name in dtype or ["bfloat16", "float32"]:
        model = GPT2Model(GPT2Config()).to(getattr(torch, name)).eval()
        tokens = torch.randint(model.config.vocab_size, (sequences, length))
        stages: dict[str, float] = {}
        started = time.perf_counter()

        def mark(stage: str, done: int, total: int, stages=stages, started=started) -> None:
            stages[stage] = time.perf_counter() - started

        dofla.linear.profile(model, tokens, samples=samples, progress=mark)
        total = time.perf_counter() - started
        with torch.inference_mode():
            started = time.perf_counter()
            for batch in tokens.split(4):
                model(batch, use_cache=False)
            forward = time.perf_counter() - started
        rows.append({"dtype": name, "seconds": total, "reading": stages["reading"], "forward_alone": forward})
        print(
            f"{name}: {total:.1f} s (reading {stages['reading']:.1f} s, spectra {total - stages['reading']:.1f} s), "
            f"{total / PAPER_SECONDS:.2f} of the paper's {PAPER_SECONDS} s; "
            f"the forward passes alone take {forward:.1f} s ({torch.get_num_threads()} threads)",
            flush=True,
        )
    if out:
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"threads": torch.get_num_threads(), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    typer.run(main)
