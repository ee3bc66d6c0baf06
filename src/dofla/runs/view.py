"""What the command line shows: progress, and tables that fit 80 columns."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm

from dofla.display import Bar, Part, Result, showing
from dofla.profiles.profile import Profile

_HEADS_PER_TABLE = 13
_SHADES = ("grey50", "blue", "cyan", "green", "yellow", "red")


class View:
    """A terminal: tables on standard output, progress on standard error.

    Args:
        quiet: show neither.
        results: show tables; not, where something else goes to standard output.
    """

    def __init__(self, quiet: bool = False, results: bool = True) -> None:
        self.quiet, self._answers = quiet, results
        self.console = Console(quiet=quiet or not results, highlight=False, markup=False)
        self._status = Console(stderr=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text)

    def answer(self, text: str) -> None:
        """A text that was asked for, which is shown even when quiet."""
        if self._answers:
            print(text)

    def show(self, *parts: Part | Result | Text) -> None:
        """Tables, results and lines, one below the other."""
        for part in parts:
            self.console.print(part)

    def note(self, text: str) -> None:
        """A line beside the progress."""
        with tqdm.external_write_mode(sys.stderr):
            self._status.print(text, soft_wrap=True)

    @contextmanager
    def progress(self, label: str) -> Iterator[Bar]:
        """A bar, for the time of the block. Without a terminal, one line at the end."""
        started = time.perf_counter()
        with showing(label, self._status.is_terminal and not self.quiet) as bar:
            yield bar
        if not self.quiet:  # of the whole block, which may go on after the last that the bar was told
            self.note(f"{label}: {bar.text or 'done'} ({time.perf_counter() - started:.0f} s)")

    def profile(self, profile: Profile, lam: float) -> None:
        """Degrees of freedom, layers down and KV heads across."""
        dof = profile.dof(lam)
        top = max(max(row) for row in dof)
        heads = max(len(row) for row in dof)
        for start in range(0, heads, _HEADS_PER_TABLE):
            shown = range(start, min(start + _HEADS_PER_TABLE, heads))
            table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
            table.add_column("layer", justify="right")
            for head in shown:
                table.add_column(str(head), justify="right")
            for n, row in enumerate(dof):
                table.add_row(str(n), *(_shaded(row[h], top) if h < len(row) else Text("") for h in shown))
            kind = f"λ = {lam:.3g}, {profile.normalization} normalised, J = {profile.samples}"
            self.console.print(f"\nDegrees of freedom, layer × KV head ({kind})")
            self.console.print(table)
        for layer in profile.skipped:
            self.say(f"  left softmax: {layer.name} ({layer.reason})")


def _shaded(value: float, top: float) -> Text:
    shade = _SHADES[min(len(_SHADES) - 1, int(len(_SHADES) * value / top))]
    return Text(f"{value:.1f}" if value < 100 else f"{value:.0f}", style=shade)
