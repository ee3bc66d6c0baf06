"""How many bytes a model needs: students with a memory that fades, made at once at several budgets, judged at several
lengths of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import TokenWindows
from dofla.display import Bar, Part, Result, reports_progress, size, table
from dofla.distillation import fade
from dofla.errors import DoflaError
from dofla.evaluation.language import next_token_figures
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import describe, plan_of, restore

BUDGETS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Point:
    """A student at a length of text.

    Attributes:
        budget: in features per KV head.
        bytes: of state per sequence.
        length: of the windows, in tokens.
        gap: student loss less teacher loss, nats per token.
        gap_interval: of 95 %, bootstrap over windows.
        kl: KL(teacher ‖ student) of the next-token distributions, nats.
    """

    budget: int
    bytes: int
    length: int
    gap: float
    gap_interval: list[float]
    kl: float


@dataclass
class Frontier(Result):
    """Quality against bytes.

    Attributes:
        points: one for each budget and length that was tried.
        cache: by length, bytes of the softmax model's key-value cache.
        target: gap that was asked for, if any.
        model: class, name and number of parameters.
        source: of the windows.
    """

    points: list[Point] = field(repr=False)
    cache: dict[int, int] = field(repr=False)
    target: float | None = None
    model: dict[str, Any] = field(default_factory=dict, repr=False)
    source: str = ""

    def at(self, length: int) -> list[Point]:
        """Of a length, the smallest budget first."""
        return sorted((x for x in self.points if x.length == length), key=lambda x: x.budget)

    def smallest(self, length: int) -> Point | None:
        """Of those tried, the smallest whose gap at ``length`` is within the target; None if none is."""
        return next((x for x in self.at(length) if self.target is not None and x.gap <= self.target), None)

    def parts(self) -> Iterator[Part]:
        """Gap by budget and length, and the smallest state within the target."""
        lengths = sorted(self.cache)
        shown = table("budget", "state", *(f"{n} tokens" for n in lengths), gap=2)
        gaps = {(x.budget, x.length): x.gap for x in self.points}
        for budget, held in sorted({(x.budget, x.bytes) for x in self.points}):
            cells = (f"{gaps[budget, n]:.4f}" if (budget, n) in gaps else "" for n in lengths)
            shown.add_row(str(budget), size(held), *cells)
        shown.add_row("softmax", "", *(size(self.cache[n]) for n in lengths))
        yield shown
        yield "gap to the original, nats per token; of softmax attention, the cache that it keeps"
        for length in lengths if self.target is not None else ():
            found = self.smallest(length)
            words = "none tried" if found is None else f"{size(found.bytes)}: dofla fade --budget {found.budget}"
            yield f"within {self.target:g} at {length} tokens: {words}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": 1, **asdict(self), "cache": {str(length): n for length, n in self.cache.items()}}


@reports_progress("frontier", Bar.stage)
def frontier(
    model: PreTrainedModel,
    tokens: TokenWindows | Tensor | Mapping[str, Tensor],
    judged: Sequence[TokenWindows],
    *,
    budgets: Sequence[int] = BUDGETS,
    target: float | None = None,
    batch_size: int = 1,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Frontier:
    """What a memory that fades keeps at several sizes and lengths; with a target, the smallest that keeps enough.

    Args:
        model: as for :func:`dofla.fade`; it is linearised in between, and restored.
        tokens: a dozen windows that students are made from.
        judged: held-out windows, of each length some.
        budgets: to try, in features per KV head.
        target: gap to stay within, in nats per token. Budgets are then tried from the smallest up until it is met at
            all lengths, and for each length one more between the last that missed it and the first that did not.
        batch_size: windows per pass.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each budget.

    Raises:
        DoflaError: as :func:`dofla.fade`; no budget, or no windows to judge by; two sets of windows of one length; a
            target that is not above 0.
    """
    sets = {windows.length: windows for windows in judged}
    if not budgets or not sets or len(sets) < len(judged):
        what = f"{len(budgets)} budgets and windows of {[w.length for w in judged]} tokens"
        raise DoflaError(f"{what}: give one budget or more, and one set of windows for each length")
    if target is not None and not 0 < target < math.inf:
        raise DoflaError(f"target is {target}: give a gap above 0, in nats per token, for instance 0.02")
    found = Frontier([], {}, target, describe(model), next(iter(sets.values())).source)

    def judge(budget: int, lengths: Sequence[int]) -> None:
        student = fade(model, tokens, budget=budget, batch_size=batch_size)
        try:
            plan = plan_of(student)
            for length in lengths:
                with evaluation_mode(student):
                    figures = next_token_figures(student, sets[length], batch_size=batch_size)
                found.cache[length] = plan.softmax_bytes(length, model.dtype)
                known = {name: figures[name] for name in ("gap", "gap_interval", "kl")}
                found.points.append(Point(budget, plan.state_bytes(model.dtype), length, **known))
        finally:
            restore(model)

    order = sorted(set(budgets))
    for done, budget in enumerate(order, start=1):
        judge(budget, list(sets))
        if progress:
            progress("budgets", done, len(order))
        if target is not None and all(found.smallest(length) for length in sets):
            break
    for length in sets if target is not None else ():
        if (between := _between(found.at(length), target)) is not None:
            judge(between, [length])
    return found


def _between(points: Sequence[Point], target: float) -> int | None:
    """The budget that would just meet the target, by a power law between the last that misses it and the first that
    does not; None if there are no such two, or nothing between them."""
    first = next((n for n, x in enumerate(points) if x.gap <= target), 0)
    if first == 0:
        return None
    low, high = points[first - 1], points[first]
    part = math.log(low.gap / target) / math.log(low.gap / max(high.gap, target / 100))
    budget = math.ceil(low.budget * (high.budget / low.budget) ** part)
    return budget if low.budget < budget < high.budget else None
