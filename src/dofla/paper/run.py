"""All tables, or one, of a model: Markdown and JSON in the folder of the run."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dofla.errors import DoflaError
from dofla.paper.accuracy import dof_against_fixed, task_accuracy
from dofla.paper.bench import Bench
from dofla.paper.cost import generation_time, sample_time, training_time
from dofla.paper.curve import errors_against_size
from dofla.paper.dimensions import dof_per_head, scale_of_dof, selected_dimensions
from dofla.paper.quality import heads, kernel_error, next_token_loss
from dofla.paper.study import Study
from dofla.paper.table import Table, show
from dofla.runs.view import View
from dofla.storage.files import replacing, write_json
from dofla.storage.lock import locked

TABLES: dict[str, Callable[[Bench], Table]] = {
    "1": selected_dimensions,
    "2": dof_per_head,
    "scale": scale_of_dof,
    "error-curve": errors_against_size,
    "4": generation_time,
    "5": sample_time,
    "7": next_token_loss,
    "11": kernel_error,
    "12": training_time,
    "heads": heads,
    "3": task_accuracy,
    "6": dof_against_fixed,
}
"""Functions that make the tables, by name, in the order in which they build on one another's students."""

_LANGUAGE_ONLY = ("3", "6")


def reproduce(
    study: Study,
    tables: Sequence[str],
    folder: str | Path,
    *,
    command: Callable[[str], str] = lambda table: "",
    notes: Sequence[str] = (),
    view: View | None = None,
) -> list[Table]:
    """Make tables of arXiv 2507.03340 for a model, by their names in :data:`TABLES` or ``all``, and write them to a
    folder: new, or of an earlier run of the same study, of which nothing is measured again. Each table shows its
    ``command``, and ends with the ``notes``. DoflaError for an unknown table, one that
    asks for next tokens of an encoder, bad input, or a folder that another process works in.
    """
    unknown = [name for name in tables if name not in (*TABLES, "all")]
    if unknown:
        raise DoflaError(f"unknown table {unknown[0]!r}: choose from {', '.join(TABLES)}, or all")
    made, view = list[Table](), view or View(quiet=True)
    with locked(folder):
        bench = Bench(study, folder, view)
        chosen = [name for name in TABLES if name in tables or "all" in tables]
        if not bench.is_language_model:
            if asked := [name for name in tables if name in _LANGUAGE_ONLY]:
                raise DoflaError(f"table {asked[0]} asks for next tokens, and {study.model} predicts none")
            chosen = [name for name in chosen if name not in _LANGUAGE_ONLY]
        for name in chosen:
            bench.begin()
            table = TABLES[name](bench)
            table.key, table.seconds, table.command = name, bench.seconds, command(name)
            table.notes += notes
            path = Path(folder) / "tables" / (f"table-{name}" if name.isdecimal() else name)
            path.parent.mkdir(exist_ok=True)
            write_json(path.with_suffix(".json"), table.to_dict())
            with replacing(path.with_suffix(".md")) as partial:
                partial.write_text(table.to_markdown(), encoding="utf-8")
            show(view, table)
            made.append(table)
    return made
