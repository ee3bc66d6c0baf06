"""Output of the command line: progress, and tables that fit 80 columns."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text
from tqdm.auto import tqdm

from dofla.display import Bar, Part, Result, showing


class View:
    """A terminal: tables on standard output, progress on standard error; when quiet, neither. Without ``results``
    something else goes to standard output, and no tables do. ``resumes`` is the folder, if there is one, from which the
    same command goes on after an interruption."""

    def __init__(self, quiet: bool = False, results: bool = True) -> None:
        self.resumes: Path | None = None
        self.quiet, self._answers = quiet, results
        self.console = Console(quiet=quiet or not results, highlight=False, markup=False)
        self._status = Console(stderr=True, highlight=False, markup=False)

    def answer(self, text: str) -> None:
        """A text that was asked for, which is shown even when quiet."""
        if self._answers:
            print(text)

    def stream(self, text: str) -> None:
        """A piece of such a text, as soon as it is there."""
        if self._answers:
            print(text, end="", flush=True)

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
