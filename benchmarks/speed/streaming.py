"""Memory and time of profiling and distilling a model whose layers stay on disk, beside the same model in memory.

    python benchmarks/speed/streaming.py
    python benchmarks/speed/streaming.py --shape llama-3.1-8b --layers 3 --windows 4 --length 512 --steps 2

A random Llama, written to a temporary folder. Each measurement has a process of its own, which does the
same with a tiny model first: memory is the growth of its largest resident size (Linux's VmHWM) after that, and its
share of the weights' bytes. Both ways train on the same windows; the largest difference between the feature maps they
end with is shown.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import dofla
from dofla.integration.checkpoint import WEIGHTS, load_model

VOCABULARY = 256
_HERE = "in-this-process"


SHAPES = {
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4},
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": torch.bfloat16,
    },
}


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "small",
    layers: int = 16,
    windows: int = 16,
    length: int = 64,
    steps: int = 8,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "tiny", 2, hidden_size=64)
        write_model(folder / "model", layers, **SHAPES[shape])
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        print(f"{layers} layers, {size / 2**20:.0f} MiB; {windows} windows of {length} tokens, {steps} steps")
        record = {"layers": layers, "bytes": size}
        for way, what in itertools.product(("stream", "memory"), ("profile", "distill")):
            grown, seconds = measured(folder, way, what, windows, length, steps)
            share = f"{grown / 2**20:6.0f} MiB, {grown / size:5.2f} of the weights"
            print(f"{what:8s} {way:7s} {share}, {seconds:5.1f} s")
            record[f"{what} {way}"] = {"grown": grown, "seconds": seconds}
        maps = [load_file(folder / way / WEIGHTS) for way in ("stream", "memory")]
        record["difference"] = max((maps[0][name] - maps[1][name]).abs().max().item() for name in maps[0])
        print(f"largest difference between the feature maps: {record['difference']:.1e}")
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measured(folder: Path, way: str, what: str, windows: int, length: int, steps: int) -> tuple[int, float]:
    """Growth in bytes and seconds of a new process that profiles or distills the model in ``folder``."""
    command = [sys.executable, __file__, _HERE, str(folder), way, what, *map(str, (windows, length, steps))]
    # So that freed memory goes back to the system, and is not counted.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "131072", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return tuple(json.loads(found))


def measure(folder: Path, way: str, what: str, windows: int, length: int, steps: int) -> tuple[int, float]:
    """The same, in this process."""
    tokens = torch.randint(VOCABULARY, (windows, length), generator=torch.Generator().manual_seed(0))

    def run(name: str, out: str) -> None:
        model = load_model(folder / name, stream=way == "stream")
        if what == "profile":
            dofla.profile(model, tokens, samples=64)
        else:
            dofla.distill(dofla.linearize(model, budget=16), tokens, steps=steps)
            dofla.save_adapter(model, folder / out)

    run("tiny", f"tiny-{way}")
    before, started = peak(), time.perf_counter()
    run("model", way)
    return peak() - before, round(time.perf_counter() - started, 2)


def peak() -> int:
    """Largest resident size of this process so far, in bytes; getrusage would count its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def write_model(folder: Path, layers: int, *, dtype: torch.dtype = torch.float32, **sizes: int) -> None:
    """A random model of these sizes."""
    sizes = {"vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4, **sizes}
    sizes.setdefault("intermediate_size", 11 * sizes["hidden_size"] // 4)
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    if sys.argv[1:2] == [_HERE]:
        folder, way, what, *numbers = sys.argv[2:]
        print(json.dumps(measure(Path(folder), way, what, *map(int, numbers))))
    else:
        typer.run(main)
