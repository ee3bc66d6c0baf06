"""How many bytes a model needs: students with a memory that fades, made at once at several budgets, judged on several
texts and at several lengths."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.display import Bar, Part, Result, factor, figure, reports_progress, size, table
from dofla.distillation.faded import FadedStudents
from dofla.errors import DoflaError
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.verdict import perplexity
from dofla.integration.checkpoint import write_adapter
from dofla.integration.reading import check_readable
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import describe, plan_of
from dofla.integration.wrapped import unwraps_its_model
from dofla.storage.defaults import with_torchs_defaults
from dofla.storage.files import new_folder, read_json, write_json

BUDGETS = (16, 32, 64, 128, 256)
FRONTIER, STUDENTS = "frontier.json", "students"
"""In the folder that is written: the figures, and a folder of adapters, each called by its budget."""

_TRIES = 3
"""Budgets between one that misses the target and one that meets it that are tried at most, for each length."""
_STEP = 1.05
"""Budgets that are nearer to each other than that are one."""


@dataclass(frozen=True)
class Point:
    """A student on a text, at a length.

    Attributes:
        budget: in features per KV head.
        bytes: of state per sequence.
        text: name of it.
        length: of the windows, in tokens.
        gap: student loss less teacher loss, nats per token.
        gap_interval: of 95 %, bootstrap over windows.
        kl: KL(teacher ‖ student) of the next-token distributions, nats.
    """

    budget: int
    bytes: int
    text: str
    length: int
    gap: float
    gap_interval: list[float]
    kl: float

    @property
    def loss(self) -> float:
        """What is held against a target: the gap, or the KL where that is more. On text like the model's own the two
        have the same mean, and chance, which moves the gap of a few windows by half of it, hardly moves the KL."""
        return max(self.gap, self.kl)


@dataclass
class Frontier(Result):
    """Quality against bytes.

    Attributes:
        points: one for each budget, length and text that was tried.
        cache: by length, bytes of the softmax model's key-value cache.
        target: loss that was asked for, if any.
        model: class, name and number of parameters.
        made_from: source, length and number of the windows that students were made from; ``reach`` and
            ``retrieval_heads``, if they were given.
        judged: by name of a text, source of its windows.
    """

    points: list[Point] = field(repr=False)
    cache: dict[int, int] = field(repr=False)
    target: float | None = None
    model: dict[str, Any] = field(default_factory=dict, repr=False)
    made_from: dict[str, Any] = field(default_factory=dict)
    judged: dict[str, str] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        """Budgets of the students that are smallest within the target at some length; without a target, all."""
        if self.target is None:
            return sorted({x.budget for x in self.points})
        return sorted({x.budget for length in self.cache if (x := self.smallest(length))})

    @property
    def texts(self) -> list[str]:
        """Their names, in the order in which they were given."""
        return list(dict.fromkeys(x.text for x in self.points))

    def at(self, length: int) -> list[Point]:
        """Of a length, the smallest budget first; of each the text that it loses most of."""
        worst: dict[int, Point] = {}
        for point in self.points:
            if point.length == length:
                worst[point.budget] = max(point, worst.get(point.budget, point), key=lambda x: x.loss)
        return [worst[budget] for budget in sorted(worst)]

    def smallest(self, length: int) -> Point | None:
        """Of those tried, the smallest that is within the target at ``length`` on all texts, and so are all larger
        ones; None if there is none."""
        found = None
        for point in reversed(self.at(length)):
            if self.target is None or point.loss > self.target:
                break
            found = point
        return found

    def between(self, length: int) -> int | None:
        """The budget that should just meet the target, by a power law between the last that misses it and the first
        that does not; None if there are no such two, or none between them that would make a difference."""
        tried, high = self.at(length), self.smallest(length)
        low = next((x for x in reversed(tried) if high is not None and x.budget < high.budget), None)
        if low is None:
            return None
        part = math.log(low.loss / self.target) / math.log(low.loss / max(high.loss, self.target / 100))
        budget = math.ceil(max(low.budget * (high.budget / low.budget) ** part, _STEP * low.budget))
        return budget if _STEP * budget <= high.budget else None

    def verdict(self) -> str:
        """A sentence for each length: the size that suffices; without a target, what the smallest and largest cost."""
        return " ".join(self._sentence(length) for length in sorted(self.cache))

    def _sentence(self, length: int) -> str:
        tried, found = self.at(length), self.smallest(length)
        where = f"at {length:,} tokens"
        if self.target is None:
            ends = tried if len(tried) == 1 else [tried[0], tried[-1]]
            costs = "; ".join(f"{size(x.bytes)} ({self._smaller(x)}): {_costs(x)}" for x in ends)
            return f"{where[0].upper()}{where[1:]}, {costs}."
        if found is None:
            best = min(tried, key=lambda x: x.loss)
            return (
                f"No size tried is within {self.target:g} nats per token {where}: {size(best.bytes)} "
                f"({self._smaller(best)}) comes closest, {_costs(best)}."
            )
        sentence = f"{size(found.bytes)} suffices {where}: {self._smaller(found)}, {_costs(found)}."
        if found is tried[0]:
            sentence += " It is the smallest size tried, so less may suffice."
        return sentence

    def _smaller(self, x: Point) -> str:
        return f"{factor(self.cache[x.length], x.bytes)} than the original's cache"

    def parts(self) -> Iterator[Part]:
        """The verdict; by length, loss increase and KL by size and text."""
        yield f"{self.verdict()}\n"
        for length in sorted(self.cache):
            yield from self._part(length)
        yield "loss increase and KL, nats per token"
        if self.target is not None:
            yield f"A size is within the target of {self.target:g} if both are, on every text."
        if heads := self.made_from.get("retrieval_heads"):
            yield f"KV heads that hold every token: {heads}; smaller budgets have no room for so many"

    def _part(self, length: int) -> Iterator[Part]:
        shown = table("cache", "smaller", *self.texts, "perplexity", gap=2)
        points = {(x.budget, x.text): x for x in self.points if x.length == length}
        for worst in self.at(length):
            own = [points.get((worst.budget, text)) for text in self.texts]
            cells = [f"{figure(x.gap)}, {figure(x.kl)}" if x else "" for x in own]
            smaller = f"{figure(self.cache[length] / worst.bytes)} x"
            shown.add_row(size(worst.bytes), smaller, *cells, perplexity(worst.gap))
        yield f"{length} tokens, of which the original's cache is {size(self.cache[length])}"
        yield shown
        yield ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": 2, **asdict(self), "cache": {str(length): n for length, n in self.cache.items()}}

    @classmethod
    def load(cls, folder: str | Path) -> Frontier:
        """Read what :func:`dofla.frontier` wrote into a folder; DoflaError naming the file if it is missing or
        damaged."""
        path = Path(folder) / FRONTIER
        data = read_json(path, "a frontier")
        try:
            cache = {int(length): n for length, n in data["cache"].items()}
            points = [Point(**point) for point in data["points"]]
            return cls(points, cache, data["target"], data["model"], data["made_from"], data["judged"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{path} holds no frontier ({what}): make it again with dofla frontier") from error


@unwraps_its_model
@with_torchs_defaults
@reports_progress("frontier", Bar.stage)
def frontier(
    model: PreTrainedModel,
    tokens: TokenWindows | Tensor | Mapping[str, Tensor],
    judged: Mapping[str, Sequence[TokenWindows]],
    *,
    budgets: Sequence[int] = BUDGETS,
    target: float | None = None,
    batch_size: int = 1,
    reach: int | None = None,
    retrieval_heads: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | Path | None = None,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Frontier:
    """What a memory that fades keeps at several sizes and lengths; with a target, the smallest that keeps enough.

    Args:
        model: as for :func:`dofla.fade`; it is linearised in between, and restored.
        tokens: a dozen windows that students are made from.
        judged: by name of a text, windows of it that students are not made from, of each length some.
        budgets: to try, in features per KV head.
        target: nats per token that gap and KL are to stay within, on all texts. Budgets are then tried from the
            smallest up until they do at all lengths, and a few more between the last that misses it and the first that
            does not.
        batch_size: windows per pass.
        reach: positions that the memory is for, as for :func:`dofla.fade`; smaller states do for fewer.
        retrieval_heads, tokenizer: as for :func:`dofla.fade`. Budgets without room for so many heads are not tried.
        out: new folder for ``frontier.json`` and for ``students``: adapters, called by their budgets, of those that
            are smallest within the target, or without a target of all.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each budget.

    Raises:
        DoflaError: as :func:`dofla.fade`; no budget, or none with room for so many retrieval heads; no windows to judge
            by; a text without windows, or with two sets of one length; windows longer than ``reach``; a target that is
            not above 0; ``out`` exists.
    """
    options = {"batch_size": batch_size, "reach": reach, "retrieval_heads": retrieval_heads, "tokenizer": tokenizer}
    students, sets = FadedStudents(model, tokens, **options), _sets(judged)
    for own in sets.values():
        check_readable(model, own.input_ids, own.source)
    if not budgets:
        raise DoflaError("no budget to try: give one or more")
    if target is not None and not 0 < target < math.inf:
        raise DoflaError(f"target is {target}: give what may be lost, above 0, in nats per token, for instance 0.02")
    if reach is not None and (longest := max(length for _, length in sets)) > reach:
        raise DoflaError(
            f"reach is {reach}, and texts of {longest} tokens are to be read: give as many, or leave it out"
        )
    windows, order = students.windows, _with_room(students, sorted(set(budgets)))
    made_from = {"source": windows.source, "length": windows.length, "windows": len(windows)}
    wanted = {"reach": reach, "retrieval_heads": retrieval_heads or None}
    made_from |= {name: number for name, number in wanted.items() if number is not None}
    sources = {text: own[0].source for text, own in judged.items()}
    found = Frontier([], {}, target, describe(model), made_from, sources)

    with new_folder(out) if out is not None else nullcontext() as folder:
        tried = 0
        while (budget := _next(found, order)) is not None:
            with students.made(budget, students.shares(budget)) as student:
                plan = plan_of(student)
                found.cache |= {length: plan.softmax_bytes(length, model.dtype) for _, length in sets}
                found.points += _judged(student, budget, sets, batch_size)
                if folder is not None:
                    home = folder / STUDENTS / str(budget)
                    home.mkdir(parents=True)
                    write_adapter(student, home)
            tried += 1
            if progress:
                progress("budgets", tried, max(tried, len(order)))
        if folder is not None:
            for budget in {x.budget for x in found.points} - set(found.kept):
                shutil.rmtree(folder / STUDENTS / str(budget))
            write_json(folder / FRONTIER, found.to_dict(), sealed=True)
    return found


def _sets(judged: Mapping[str, Sequence[TokenWindows]]) -> dict[tuple[str, int], TokenWindows]:
    """Windows by text and length."""
    sets = {(text, windows.length): windows for text, own in judged.items() for windows in own}
    if not judged or not all(judged.values()) or len(sets) < sum(map(len, judged.values())):
        what = ", ".join(f"{text!r} of {[w.length for w in own]} tokens" for text, own in judged.items()) or "none"
        raise DoflaError(f"windows to judge by: {what}: give each text one set of windows for each length")
    return sets


def _with_room(students: FadedStudents, budgets: Sequence[int]) -> list[int]:
    """Of the budgets, the smallest first, those from the first on in which so many heads can hold every token."""
    for n, budget in enumerate(budgets):
        try:
            students.check_shares(budget)
        except DoflaError:
            if not students.retrieval_heads or n == len(budgets) - 1:
                raise
        else:
            return list(budgets[n:])
    return []


def _costs(x: Point) -> str:
    return f"perplexity {perplexity(x.gap)}"


def _judged(
    student: PreTrainedModel, budget: int, sets: Mapping[tuple[str, int], TokenWindows], batch_size: int
) -> Iterator[Point]:
    held = plan_of(student).state_bytes(student.dtype)
    for (text, length), windows in sets.items():
        with evaluation_mode(student):
            figures = next_token_figures(student, windows, batch_size=batch_size)
        known = {name: figures[name] for name in ("gap", "gap_interval", "kl")}
        yield Point(budget, held, text, length, **known)


def _next(found: Frontier, order: Sequence[int]) -> int | None:
    """The budget to try after those that were tried, None if there is none."""
    tried = {x.budget for x in found.points}
    left = [budget for budget in order if budget not in tried]
    met = bool(tried) and found.target is not None and all(found.smallest(length) for length in found.cache)
    if left and not met:
        return left[0]
    if found.target is None or len(tried - set(order)) >= _TRIES * len(found.cache):
        return None
    return next(filter(None, map(found.between, sorted(found.cache))), None)
