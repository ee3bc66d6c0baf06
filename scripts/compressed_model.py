"""Make one of the compressed models of docs/students, with a card of figures on several kinds of text.

    python scripts/compressed_model.py models/smollm2-135m --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/stories-val.txt.gz \\
        --text data/books-val.txt.gz --out docs/students/smollm2-135m-compressed

MODEL is what smollm2_checkpoint.py writes. Python source, the standard library of the interpreter that runs this, is
always among the texts.
"""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer

import dofla
from dofla.integration.checkpoint import load_model
from dofla.integration.converted import Converted
from dofla.integration.model_card import write_card

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
WINDOWS = {512: 24, 2048: 8}
PYTHON = "Python's standard library"


def main(
    model: Annotated[str, typer.Argument(help="Folder of the model.")],
    calibrate: Annotated[Path, typer.Option(help="Text that the model is calibrated on.")],
    text: Annotated[list[Path], typer.Option(help="Texts to evaluate on; repeatable.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    size: Annotated[
        str, typer.Option(help="Of the compressed cache; default the bytes of 64 features per KV head.")
    ] = "1485KiB",
    dtype: Annotated[str, typer.Option(help="To compute in; the card is of a model in bfloat16.")] = "bfloat16",
) -> None:
    opened, tokenizer = load_model(model, dtype=getattr(torch, dtype)), AutoTokenizer.from_pretrained(model)
    compressed = dofla.compress(
        opened, dofla.token_windows(calibrate, tokenizer, length=512, windows=12), size, retrieval_heads=0
    )
    texts = " ".join([f"--calibrate {calibrate.name}", *(f"--text {path.name}" for path in text)])
    command = f"python scripts/compressed_model.py models/smollm2-135m --size {size} --dtype {dtype} --out NEW {texts}"
    dofla.note(compressed, base_model=BASE, license="apache-2.0")
    source = {path.name: path for path in text} | {PYTHON: sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))}
    for name, where in source.items():
        for length, windows in WINDOWS.items():
            own = dofla.token_windows(where, tokenizer, length=length, windows=windows, split="all")
            result = dofla.evaluate(compressed, replace(own, source=f"{name} (all)"), fidelity_windows=1)
            dofla.note(compressed, figures=result, command=command)
    dofla.save_adapter(compressed.to(torch.bfloat16), out)
    handle = Converted.of(compressed)
    write_card(out, handle.plan, handle.record, adapter=True, name=f"docs/students/{out.name}")
    Console(width=80).print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
