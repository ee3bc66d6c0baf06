"""Memory of the engines of engines.py: what a process holds at most while it reads a prompt and decodes after it.

    python benchmarks/peers/engine_memory.py models/smollm2-135m --llama build/llama/bin/python \\
        --openvino build/openvino/bin/python --exported build/openvino/smollm2-135m

Each engine is in a process of its own, which has nothing else; environments as in engines.py. The peak is that of
resident memory, code of libraries and weights included, counted from when the weights are open. Linux alone tells it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import transformers
import typer
from engines import LLAMA, OPENVINO, CacheSize, Elsewhere, Exported, Gguf, Llama, Model, OpenVino, running

from dofla.display import size as shown

TOKENS = 4
"""Decoded after each prompt."""
TORCH = ("softmax", "{size}", "evict=False", "{size}, int8, compiled")


def peak(engine: Elsewhere, count: int) -> int:
    """Bytes that the process holds at most while it reads so many tokens and decodes some."""
    process = Path(f"/proc/{engine.process.pid}")
    (process / "clear_refs").write_text("5")  # what is held now is the most
    engine.read(count)
    for _ in range(TOKENS):
        engine.token()
    (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(
    model: Model,
    llama: Llama = None,
    gguf: Gguf = "",
    openvino: OpenVino = None,
    exported: Exported = "",
    length: Annotated[list[int] | None, typer.Option(help="Of a prompt; default 512, 2048, 8000.")] = None,
    cache: CacheSize = "1.5MiB",
) -> None:
    transformers.logging.set_verbosity_error()
    lengths = sorted(length or [512, 2048, 8000])
    engines = [(sys.executable, "torch", model, kind.format(size=cache)) for kind in TORCH]
    engines += [(llama, "llama.cpp", gguf, kind) for kind in LLAMA if llama]
    engines += [(openvino, "OpenVINO", exported, kind) for kind in OPENVINO if openvino]
    print(f"{'':<36}{'weights':>10}" + "".join(f"{f'{count:,} tokens':>16}" for count in lengths), flush=True)
    for python, name, weights, kind in engines:
        with running(python, name, weights, lengths[-1] + TOKENS + 8, (kind,)) as found:
            ((title, engine),) = found.items()
            peaks = [peak(engine, count) for count in lengths]
        print(f"{title:<36}{shown(engine.weights):>10}" + "".join(f"{shown(own):>16}" for own in peaks), flush=True)


if __name__ == "__main__":
    typer.run(main)
