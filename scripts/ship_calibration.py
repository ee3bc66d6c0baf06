"""Calibrate a model on the text that comes with dofla, into a file that comes with dofla too.

    python scripts/ship_calibration.py models/smollm2-135m HuggingFaceTB/SmolLM2-135M-Instruct
    python scripts/ship_calibration.py demo dofla-demo --context 512    # it was trained on no more

The second argument is the model's name, which the calibration says it is of.
"""

from __future__ import annotations

from dataclasses import replace

import typer

import dofla
from dofla.compression.compress import default_windows
from dofla.compression.known import SHIPPED, keep
from dofla.integration.positions import positions_of
from dofla.runs.opening import open_original


def main(model: str, name: str, context: int | None = None) -> None:
    opened, tokenizer = open_original(model, dtype="float32")
    windows = default_windows(tokenizer, context or positions_of(opened))
    found = dofla.calibrate(opened, windows, tokenizer=tokenizer, context=context)
    print(keep(replace(found, model=name), SHIPPED))


if __name__ == "__main__":
    typer.run(main)
