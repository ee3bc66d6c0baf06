"""A calibration of a model that does not fit into memory: the shape of Llama 3.1 8B, with random weights on disk.

    python benchmarks/quality/offloaded.py --folder build/offloaded

Layers come from disk one after the other, so a few of them take the memory of all; more of them take more time, which
is extrapolated to all 32. Each row is a process of its own, whose peak counts everything: Python, weights that are in
memory, and pages of files. Text is the bundled one, by the bundled tokenizer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from calibration import forget_peak, memory
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import dofla
from dofla.compression.directions import default_cut
from dofla.display import size, table

ALL = 32
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def main(
    folder: Annotated[Path, typer.Option(help="For the weights, 2 GB and 0.4 GB a layer.")],
    layers: Annotated[list[int] | None, typer.Option(help="Numbers of layers; repeatable; default 1, 3.")] = None,
    calibrate: Annotated[int | None, typer.Option(help="Layers of the model to calibrate in this process.")] = None,
) -> None:
    if calibrate:
        print(json.dumps(measured(folder / str(calibrate), folder / "offload")))
        return
    shown, found = table("layers", "weights", "seconds", "CPU s", "peak memory"), {}
    for count in layers or [1, 3]:
        weights = written(folder / str(count), count)
        command = [sys.executable, __file__, "--folder", str(folder), "--calibrate", str(count)]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds, cpu, peak = found[count] = json.loads(result.stdout.splitlines()[-1])
        shown.add_row(str(count), size(weights), f"{seconds:.0f}", f"{cpu:.0f}", size(peak))
    (few, less), (more, all_of_it) = min(found.items()), max(found.items())
    if few < more:
        times = [a + (b - a) / (more - few) * (ALL - few) for a, b in zip(less[:2], all_of_it[:2], strict=True)]
        shown.add_row(f"{ALL}, extrapolated", "", *(f"{x:.0f}" for x in times), "")
    Console(width=100).print(shown)


def written(folder: Path, layers: int) -> int:
    """Write a checkpoint of random weights, unless it is there; its bytes."""
    if not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = LlamaConfig(num_hidden_layers=layers, dtype=torch.bfloat16, **SHAPE)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        places = {}
        for name, weight in model.named_parameters():
            random = torch.empty(weight.shape, dtype=torch.bfloat16).normal_(0, 0.02)
            places[name] = f"{name}.safetensors"
            save_file(
                {name: random if weight.ndim > 1 else torch.ones_like(random)}, folder / places[name], {"format": "pt"}
            )
        config.save_pretrained(folder)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measured(folder: Path, offload: Path) -> tuple[float, float, int]:
    """Seconds, those of the processor, and peak memory of a calibration."""
    _, tokenizer, _ = dofla.demo()
    options = {"device_map": "auto", "max_memory": {"cpu": "1MiB"}, "offload_folder": offload}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    windows = dofla.token_windows("sample", tokenizer, **default_cut(SHAPE["max_position_embeddings"]))
    forget_peak()
    started, spent = time.perf_counter(), time.process_time()
    dofla.calibrate(model, windows, tokenizer=tokenizer, progress=False)
    return time.perf_counter() - started, time.process_time() - spent, memory("VmHWM")


if __name__ == "__main__":
    typer.run(main)
