"""Calibrate a model on the text that comes with dofla, into a file that comes with dofla too.

    python scripts/ship_calibration.py models/smollm2-135m HuggingFaceTB/SmolLM2-135M-Instruct

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


def main(model: str, name: str) -> None:
    opened, tokenizer = open_original(model, dtype="float32")
    found = dofla.calibrate(opened, default_windows(tokenizer, positions_of(opened)), tokenizer=tokenizer)
    print(keep(replace(found, model=name), SHIPPED))


if __name__ == "__main__":
    typer.run(main)
