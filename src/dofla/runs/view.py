"""What the command line shows: progress, and tables that fit 80 columns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dofla.distillation import History
from dofla.plans.curves import Curves
from dofla.plans.hybrid import TOKEN_SHARE
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.tasks.view import critical_line, curve_table, tasks_table

_HEADS_PER_TABLE = 13
_SHADES = ("grey50", "blue", "cyan", "green", "yellow", "red")


class Bar:
    """What :meth:`View.progress` yields: called with (done, total, text), or in one of the ways the library reports."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: int, total: int, text: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, count=f"{done}/{total}", text=text)

    def stage(self, stage: str, done: int, total: int) -> None:
        """Of something that goes through several stages."""
        self(done, total, stage)

    def losses(self, step: int, steps: int, losses: Mapping[str, float]) -> None:
        """Of a training."""
        self(step, steps, loss_range(losses))


class View:
    """A terminal: tables on standard output, progress on standard error.

    Args:
        quiet: show neither.
        results: show tables; not, where something else goes to standard output.
    """

    def __init__(self, quiet: bool = False, results: bool = True) -> None:
        self.quiet, self._answers = quiet, results
        self.console = Console(quiet=quiet or not results, highlight=False)
        self._status = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False)

    def answer(self, text: str) -> None:
        """A text that was asked for, which is shown even when quiet."""
        if self._answers:
            print(text)

    def note(self, text: str) -> None:
        """A line beside the progress."""
        self._status.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, label: str) -> Iterator[Bar]:
        """A bar, for the time of the block. Without a terminal, one line at the end."""
        counts = TextColumn("{task.fields[count]} {task.fields[text]}")
        columns = (TextColumn(label), BarColumn(bar_width=20), counts, TimeRemainingColumn())
        shown, started = self._status.is_terminal and not self.quiet, time.perf_counter()
        with Progress(*columns, console=self._status, transient=True, disable=not shown) as progress:
            bar = Bar(progress, progress.add_task(label, total=None, count="", text=""))
            yield bar
            text = progress.tasks[0].fields["text"]
        if not self.quiet:  # of the whole block, which may go on after the last that the bar was told
            self.note(f"{label}: {text or 'done'} ({time.perf_counter() - started:.0f} s)")

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

    def plan(self, plan: Plan) -> None:
        """What each layer becomes, with bars."""
        most = max((max(x.features_per_head) for x in plan.layers if not x.keep_softmax), default=1)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("layer", max_width=30, overflow="ellipsis", no_wrap=True)
        for title in ("features", "window", "sinks"):
            table.add_column(title, justify="right")
        table.add_column("")
        for layer in plan.layers:
            if layer.keep_softmax:
                table.add_row(layer.name, "softmax", "", "", "")
                continue
            shown = [str(x[0]) if len(set(x)) == 1 else f"{min(x)}-{max(x)}" for x in zip(*layer.sizes, strict=True)]
            bar = Text("━" * max(1, round(24 * max(layer.features_per_head) / most)), style="cyan")
            table.add_row(layer.name, *shown, bar)
        self.console.print(table)
        self.say(f"state per sequence: {size(plan.state_bytes())} in float32, whatever the context")

    def curves(self, curves: Curves) -> None:
        """Error of each layer at the sizes tried with the usual share of exact tokens, and what it does."""
        sizes = sorted({p.bytes for layer in curves.layers for p in layer.points if p.share == TOKEN_SHARE})
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title="attention KL by bytes per KV head")
        table.add_column("layer", max_width=30, overflow="ellipsis", no_wrap=True)
        for title in (*map(str, sizes), "effect"):
            table.add_column(title, justify="right")
        for layer in curves.layers:
            errors = {p.bytes: f"{statistics.fmean(p.errors):.3f}" for p in layer.points if p.share == TOKEN_SHARE}
            table.add_row(layer.name, *(errors.get(n, "") for n in sizes), f"{sum(layer.effects):.3f}")
        self.console.print(table)
        self.say("effect: harm to the model's answer (KL; an encoder's relative error) per nat of its heads'")

    def losses(self, history: History) -> None:
        """Loss of each layer at the start and at the end (means over a tenth of the steps)."""
        tenth = max(1, len(history.losses) // 10)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("layer")
        for title in ("first", "last"):
            table.add_column(f"{title} {history.settings['loss']} loss", justify="right")
        means = zip(history.layers, history.losses[:tenth].mean(0), history.losses[-tenth:].mean(0), strict=True)
        for name, first, last in means:
            table.add_row(name, f"{first:.4f}", f"{last:.4f}")
        self.console.print(table)

    def evaluation(self, figures: dict[str, Any]) -> None:
        """The figures of one student."""
        for section in ("language", "embeddings"):
            for key, value in figures.get(section, {}).items():
                shown = f"{value[0]:.4f} to {value[1]:.4f}" if isinstance(value, list) else f"{value:.6g}"
                self.say(f"{key.replace('_', ' '):>20}  {shown}")
        if "softmax_bytes" in figures:
            ours, theirs = size(figures["state_bytes"]), size(figures["softmax_bytes"])
            self.say(f"{'state':>20}  {ours} (softmax cache at {figures['length']} tokens: {theirs})")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("layer")
        for title in ("attention KL", "output error"):
            table.add_column(title, justify="right")
        for name, layer in figures["layers"].items():
            table.add_row(name, f"{layer['kl']:.4f}", f"{layer['output_error']:.4f}")
        self.console.print(table)

    def tasks(self, figures: dict[str, Any]) -> None:
        """Tasks one by one, by each metric, and the win-and-tie rate over them."""
        for metric, rates in figures["win_and_tie"].items():
            self.console.print()
            self.console.print(tasks_table(figures, metric))
            self.say(critical_line(rates))
        self.console.print()
        self.console.print(curve_table(figures["win_and_tie"]["acc"]))

    def student(self, row: dict[str, Any], names: Sequence[str], seeds: Sequence[int]) -> None:
        """A row of a run's comparison, as soon as it is known; the first with what stands above all of them.

        Args:
            row: of the results.
            names: of all students, for the width of their column.
            seeds: of the run.
        """
        first = row["name"] == names[0]
        if first:
            self.console.print()
        self.console.print(results_row(row, max(map(len, names)), several=len(seeds) > 1, heads=first))

    def results(self, results: dict[str, Any]) -> None:
        """What stands below the rows of a run's comparison."""
        if "teacher_loss" in results["students"][0]:
            self.say(f"teacher loss {results['students'][0]['teacher_loss']:.4f} nats per token")
        if len(results["seeds"]) > 1:
            self.say(f"mean of {len(results['seeds'])} seeds ± half their range")
        best = min(results["students"], key=lambda row: row.get("gap", row["attention_kl"])["mean"])
        for sample in best["runs"][0].get("samples", []):
            self.console.print()
            for who in ("prompt", "teacher", "student"):
                name = f"student ({best['name']})" if who == "student" else who
                self.console.print(Text.assemble((f"{name}: ", "bold"), " ".join(sample[who].split())))


_COLUMNS = {
    "student_loss": "loss",
    "gap": "gap",
    "kl": "KL",
    "top1_agreement": "top-1",
    "cosine": "cosine",
    "spearman": "Spearman",
    "attention_kl": "attn KL",
    "attention_output_error": "out err",
}
_FIGURE, _SPREAD, _SIZE = len("-0.000"), len("±0.00"), len("1000.0 KiB")


def results_row(row: dict[str, Any], longest_name: int, *, several: bool, heads: bool) -> Table:
    """A student, its figures across, in columns as wide as for any other; perhaps with their heads."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=heads)
    table.add_column("student", no_wrap=True, min_width=max(longest_name, len("student")))
    keys = [key for key in _COLUMNS if key in row]
    for key in keys:
        width = _FIGURE + (_SPREAD if several and key == "gap" else 0)
        table.add_column(_COLUMNS[key], justify="right", no_wrap=True, min_width=max(width, len(_COLUMNS[key])))
    table.add_column("state", justify="right", no_wrap=True, min_width=_SIZE)
    cells = [_figure(row[k]["mean"]) + (f"±{row[k]['spread']:.2f}" if several and k == "gap" else "") for k in keys]
    table.add_row(row["name"], *cells, size(row["state_bytes"]))
    return table


def _figure(value: float) -> str:
    """Three decimals; where no key beyond a window is seen, KL(teacher ‖ student) has no end."""
    return f"{value:.3f}" if value < 1e4 else "∞"


def loss_range(losses: Mapping[str, float]) -> str:
    """Loss of all layers in a few words."""
    values = losses.values()
    return f"loss {statistics.fmean(values):.3f} (layers {min(values):.2f} to {max(values):.2f})"


def size(count: int) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _shaded(value: float, top: float) -> Text:
    shade = _SHADES[min(len(_SHADES) - 1, int(len(_SHADES) * value / top))]
    return Text(f"{value:.1f}" if value < 100 else f"{value:.0f}", style=shade)
