"""The verb ``dofla reproduce``."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dofla.cli.common import written
from dofla.cli.options import Device, Given
from dofla.cli.settings import Sections
from dofla.cli.verb import current_view
from dofla.paper.study import Study
from dofla.runs.recipe import slug

NAMES = "1, 2, scale, error-curve, 4, 5, 7, 11, 12, heads, 3, 6"
"""Names of the tables in :data:`dofla.paper.TABLES`."""
_SMALL = "scale small: too small to rank methods"


def reproduce(
    model: Annotated[
        str, Option(help="Model: gpt2, pythia-1b, smollm2-135m, minilm, demo, a folder or hub name.")
    ] = "demo",
    table: Annotated[list[str] | None, Option(help=f"Table: {NAMES}; repeatable; default: all.")] = None,
    seeds: Annotated[int, Option(help="Number of random seeds, from 0.")] = 3,
    scale: Annotated[str, Option(help="Scale: full, or small (for a laptop).")] = "full",
    out: Annotated[
        Path | None, Option(help="Folder, where an interrupted run resumes; default runs/reproduce-MODEL-SCALE.")
    ] = None,
    device: Device = None,
    changes: Given = Sections([Study]),
) -> dict[str, Any]:
    """Reproduce the paper's tables for a model.

    The published figures stand beside them.
    """
    from dofla.paper.run import reproduce as make_tables

    study = Study.of(model, scale, seeds, changes)
    study.device = device or study.device
    folder = out or Path("runs") / f"reproduce-{slug(Path(model).name)}-{scale}"
    rest = ["--seeds", str(seeds), "--scale", scale, *(["--device", device] if device else [])]
    rest += [word for setting in changes for word in ("--set", setting)]
    view, notes = current_view(), [_SMALL] if scale == "small" else []
    view.resumes = folder

    def command(name: str) -> str:
        return shlex.join(["dofla", "reproduce", "--model", model, "--table", name, *rest])

    made = make_tables(study, table or ["all"], folder, command=command, notes=notes, view=view)
    written("tables (Markdown and JSON)", folder / "tables")
    return {"folder": folder, "tables": [one.to_dict() for one in made]}
