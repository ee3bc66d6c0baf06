"""Seconds per layerwise distillation step beside a plain training step: the paper's way, with all query rows and with a
sample of them, and the default's.

    python benchmarks/speed/distill.py

The model is the bundled teacher's shape or any checkpoint (--model); all three are timed in the same run on the same
windows, and the ratios are to the plain step (forward and backward of the softmax model with all weights training).
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

import dofla
from dofla.integration.packages import packaged_path
from dofla.integration.sites import attention_sites
from dofla.plans.layers import FeatureLayer
from dofla.plans.plan import Plan
from dofla.runs.opening import dtype_of


def main(
    model: Annotated[str, typer.Option(help="Folder, hub name or demo.")] = "demo",
    length: int = 1024,
    batch_size: int = 4,
    rows: int = 128,
    budget: Annotated[int, typer.Option(help="Features, or the bytes of so many for hybrid layers.")] = 32,
    dtype: str = "float32",
    repeats: int = 3,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_pretrained(packaged_path(model), dtype=dtype_of(dtype))
    tokens = torch.randint(student.config.vocab_size, (batch_size, length))

    def plain_step() -> None:
        student.train()
        student(tokens, labels=tokens, use_cache=False).loss.backward()
        student.zero_grad()

    def layerwise_step(rows: int | None, loss: str) -> None:
        dofla.linear.distill(student, tokens, steps=1, batch_size=batch_size, rows=rows, loss=loss)

    seconds = {"plain training step": _time(plain_step, repeats)}
    sites = attention_sites(student).items()
    plan = Plan([FeatureLayer(n, s.kv_heads, s.head_dim, s.value_dim, budget) for n, s in sites])
    dofla.linear.linearize(student, plan)
    seconds["prf, softmax loss, all rows"] = _time(lambda: layerwise_step(None, "softmax"), repeats)
    seconds[f"prf, softmax loss, rows={rows}"] = _time(lambda: layerwise_step(rows, "softmax"), repeats)
    dofla.restore(student)
    dofla.linear.linearize(student, budget=budget)
    seconds[f"hybrid, output loss, rows={rows}"] = _time(lambda: layerwise_step(rows, "output"), repeats)

    base = seconds["plain training step"]
    print(f"{model}, {batch_size} windows of {length} tokens, budget {budget}, {torch.get_num_threads()} threads")
    for name, value in seconds.items():
        print(f"{name:33} {value:7.3f} s   {value / base:5.2f} x")
    if out:
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"model": model, "length": length, "batch_size": batch_size, "seconds": seconds}, file, indent=2)


def _time(step, repeats: int) -> float:
    step()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    typer.run(main)
