"""What a compressed cache loses of the same windows when they stand further back in a text: KL(teacher ‖ student) of
the next tokens by the position of the first, for memories measured over more or fewer positions.

    python benchmarks/quality/positions.py --model models/smollm2-135m \\
        --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/books-val.txt.gz

The original of a model with rotary positions does not notice where a window stands; its keys turn with their position,
and codes measured at the first positions alone fit no others. All layers have the same size.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import dofla
from dofla.data import TokenWindows
from dofla.display import table
from dofla.distillation.objective import Objective
from dofla.integration.placement import placed
from dofla.runs.opening import open_original


@torch.inference_mode()
def divergence(loss: Objective, windows: TokenWindows, first: int = 0) -> float:
    """Mean over the tokens of windows that begin at position ``first``, read one by one, in nats."""
    parts = [placed(windows.batch([n]), first) for n in range(len(windows))]
    count = sum(map(loss.count, parts))
    return sum(loss(part, count, len(parts)).item() for part in parts)


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model with rotary positions.")],
    calibrate: Annotated[str, typer.Option(help="Text to measure directions on; self: the model's own.")],
    text: Annotated[list[Path], typer.Option(help="Texts to judge on; repeatable.")],
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    windows: Annotated[int, typer.Option(help="Of 512 tokens, of each text.")] = 8,
    first: Annotated[list[int] | None, typer.Option(help="Positions; repeatable; default 0, 1500, 6000.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Default 512, 2048 and all that the model has.")] = None,
) -> None:
    teacher, tokenizer = open_original(model)
    tokens = dofla.token_windows(calibrate, tokenizer, length=512, windows=12, model=teacher)
    judged = {
        path.name.partition(".")[0]: dofla.token_windows(path, tokenizer, length=512, windows=windows, split="all")
        for path in text
    }
    shown = table("measured over", "windows begin at", *judged, gap=2)
    for each in context or [512, 2048, None]:
        student = dofla.compress(teacher, tokens, size, head_budgets="even", context=each, retrieval_heads=0)
        loss = Objective(student, partial(dofla.original, student))
        for place in first or [0, 1500, 6000]:
            cells = (f"{divergence(loss, own, place):.4f}" for own in judged.values())
            shown.add_row(f"{each or 'all'} positions", str(place), *cells)
        dofla.restore(student)
    Console(width=120).print(shown)


if __name__ == "__main__":
    typer.run(main)
