"""Progress bars: what takes minutes shows one, unless told not to, on terminals and in notebooks."""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from rich.console import Console
from tqdm.auto import tqdm

from dofla.storage.rank import is_main_process

P = ParamSpec("P")
R = TypeVar("R")

_taken: ContextVar[bool] = ContextVar("dofla_bar", default=False)
"""True if there is a bar already, or none is wanted: what is called within shows none of its own."""


class Bar:
    """Called with (done, total, text), or in one of the ways the library reports."""

    def __init__(self, label: str, shown: bool) -> None:
        self.text = ""
        waiting = "{desc} [{elapsed}]"  # until the first report says of how much
        self._bar = tqdm(desc=label, bar_format=waiting, leave=False, dynamic_ncols=True, disable=not shown)

    def __call__(self, done: int, total: int, text: str = "") -> None:
        self.text = text
        self._bar.bar_format = "{desc} {bar:20} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
        self._bar.set_postfix_str(text, refresh=False)
        if total != self._bar.total:  # the first report, which may be of work that goes on; or another stage
            self._bar.reset(total)
            self._bar.n = self._bar.last_print_n = done
            self._bar.refresh()
        self._bar.update(done - self._bar.n)

    def stage(self, stage: str, done: int, total: int) -> None:
        """Report progress within a stage, whose name is shown beside the bar but not kept as the final text."""
        self(done, total, stage)
        self.text = ""

    def losses(self, step: int, steps: int, losses: Mapping[str, float]) -> None:
        """Report a step of a training, with the range of the layers' losses."""
        values = losses.values()
        mean = f"loss {statistics.fmean(values):.3f}"
        text = mean if len(values) == 1 else f"{mean} (layers {min(values):.2f} to {max(values):.2f})"
        self(step, steps, text)

    def close(self) -> None:
        """Take it off the screen."""
        self._bar.close()


@contextmanager
def showing(label: str, shown: bool) -> Iterator[Bar]:
    """A bar for the time of the block, the only one: of what is called within, none shows one."""
    token = _taken.set(True)
    bar = Bar(label, shown)
    try:
        yield bar
    finally:
        bar.close()
        _taken.reset(token)


@contextmanager
def reporting(label: str, progress: object, way: Callable) -> Iterator[Callable | None]:
    """The function to call with progress during the block: the caller's function, a new bar's, or None. Calls within
    the block show no bar of their own.

    Args:
        label: of the bar.
        progress: a function; True for a bar, if it is seen by somebody and there is none yet; anything else for none.
        way: the method of :class:`Bar` that takes what is reported.
    """
    if progress is True and not _taken.get() and is_main_process() and (sys.stderr.isatty() or Console().is_jupyter):
        with showing(label, True) as bar:
            yield way.__get__(bar)
    else:
        token = _taken.set(True)
        try:
            yield progress if callable(progress) else None
        finally:
            _taken.reset(token)
