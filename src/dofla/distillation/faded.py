"""Students with a memory that fades, of one model and one text: what does not hang on their bytes is measured once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.data.facts import Facts
from dofla.distillation.forgetting import costs_of_heads
from dofla.distillation.objective import Objective
from dofla.distillation.retrieval import check_retrieval_heads, facts_for, with_retrieval_heads
from dofla.errors import DoflaError
from dofla.integration.consistency import check_consistency
from dofla.integration.directions import Directions, directions_of, give_directions
from dofla.integration.fading import fading_plan
from dofla.integration.places import placed_over, whole_reach
from dofla.integration.positions import positions_of
from dofla.integration.reading import windows_for
from dofla.integration.sites import evaluation_mode
from dofla.integration.streaming import is_streamed
from dofla.integration.surgery import convert, describe, plan_of, restore, softmax
from dofla.plans.plan import Plan
from dofla.plans.shares import LEAST, Shares, held_out_line, shared

logger = logging.getLogger(__name__)

HELD = 0.25
"""Of a window, the most that a memory holds with which shares are measured: what a head would do with four times as
much can be seen in it."""
SMALLEST = 16
"""Features per KV head with which they are measured however short windows are."""
TWICE, LOOKED_UP = 1 / 3, 0.05
"""How much of the text is also read twice, where everything can be looked up the second time; and what the loss on that
counts for beside the loss on the text."""
BACK = 1024
"""How far back it then stands, if the model has so many positions. Other heads look up what stands far back than what
is near: with 256, one that a needle 4,096 tokens back hangs on got half of the bytes that it wants."""
_REFERENCE, _ANY = 64, 2**31  # features whose memory is counted in tokens, were there positions for any number

Batches = list[dict[str, Tensor]]


class FadedStudents:
    """Makes them, one at a time, of the model itself.

    A student is measured whose KV heads all have the same size, and a small one; what forgetting costs in each head of
    it (:mod:`dofla.distillation.forgetting`) says which of them want the bytes. Most heads look at little that is far,
    and a few look things up (retrieval heads, Wu et al. 2024, arXiv 2404.15574): bytes go to them, and with
    ``retrieval_heads`` as many of them as are asked for hold all tokens, as DuoAttention (Xiao et al. 2024, arXiv
    2410.10819) keeps them whole.

    Args:
        model, tokens, keep_softmax, batch_size, reach, retrieval_heads, tokenizer: as for :func:`dofla.fade`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: TokenWindows | Tensor | Mapping[str, Tensor],
        *,
        keep_softmax: Collection[str] = (),
        batch_size: int = 1,
        reach: int | None = None,
        retrieval_heads: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model, self.windows = model, windows_for(model, tokens)
        self.keep_softmax, self.batch_size, self.reach = keep_softmax, batch_size, reach
        self.retrieval_heads, self.tokenizer = retrieval_heads, tokenizer
        self._directed: Callable[[int, int], None] | None = None
        self._on_text: dict[int, Shares] = {}  # by the budget they were measured with, which large ones have in common

    def plan(self, budget: float, shares: Shares | None = None) -> Plan:
        """What becomes of the model with so many bytes; DoflaError as :func:`dofla.fade`."""
        return fading_plan(self.model, budget, shares=shares, keep_softmax=self.keep_softmax, reach=self.reach)

    def make(self, budget: float, shares: Shares | None = None) -> PreTrainedModel:
        """The model as a student; by default all its KV heads have the same size."""
        convert(self.model, self.plan(budget, shares))
        try:
            give_directions(self.model, self.directions)
        except BaseException:
            restore(self.model)
            raise
        return self.model

    @contextmanager
    def made(self, budget: float, shares: Shares | None = None) -> Iterator[PreTrainedModel]:
        """Within the block the model is a student (:meth:`make`)."""
        student = self.make(budget, shares)
        try:
            yield student
        finally:
            restore(self.model)

    def check_shares(self, budget: float) -> None:
        """DoflaError, as :func:`dofla.measure_shares`, if those of ``budget`` cannot be measured: before minutes go."""
        if is_streamed(self.model):
            raise DoflaError(
                "measuring shares needs the whole model in memory: open it without stream, or split evenly"
            )
        if any(weight.is_inference() for weight in self.model.parameters()):
            raise DoflaError(
                "the model was made within torch.inference_mode(), and no gradients pass through it: open it outside, "
                "or split evenly"
            )
        even = self.plan(budget)  # what is wrong with it is wrong with any share
        check_retrieval_heads(even, self.retrieval_heads, self.tokenizer, lambda shares: self.plan(budget, shares))
        least = self.measured_at(budget)
        try:
            self.plan(math.floor(LEAST * least))
        except DoflaError:
            share = f"a KV head's least share is {LEAST:.2f} of it"
            raise DoflaError(f"budget {least} is too small to share: {share}; give more, or shares='even'") from None

    def check_consistency(self, budget: float) -> None:
        """DoflaError if a student of ``budget`` fails with a cache, whatever the shares of its heads."""
        with self.made(budget) as student:
            check_consistency(student, lambda: softmax(student))

    def measured_at(self, budget: int) -> int:
        """The budget that shares of ``budget`` are measured with: it holds no more than :data:`HELD` of a window."""
        even = fading_plan(self.model, _REFERENCE, keep_softmax=self.keep_softmax, reach=_ANY)
        held = [layer.places_per_head[0] for layer in even.layers]
        most = math.floor(_REFERENCE * HELD * self.windows.length / max(held, default=1))
        return min(budget, max(SMALLEST, most))

    @property
    def passes(self) -> int:
        """Over batches, that measuring shares takes."""
        times = 3 if len(self._halves) > 1 else 1  # measured shares and even ones are tried as well
        return times * sum(map(len, self._texts)) + (len(self._facts.documents) if self.retrieval_heads else 0)

    def shares(self, budget: int, report: Callable[[], None] = lambda: None) -> Shares:
        """How KV heads best share ``budget``; ``report`` is called after each pass.

        Raises:
            DoflaError: as :func:`dofla.measure_shares`.
        """
        self.check_shares(budget)
        if (least := self.measured_at(budget)) not in self._on_text:
            self._on_text[least] = self._shares_on_text(least, report)
        shares = self._on_text[least]
        if not self.retrieval_heads:
            return shares
        with self.made(budget, shares) as student:
            return with_retrieval_heads(student, shares, self.retrieval_heads, self._facts, report)

    @cached_property
    def directions(self) -> dict[str, Directions]:
        """That matter to coded tokens, by layer."""
        layers = [layer.name for layer in self.plan(_REFERENCE).layers if not layer.keep_softmax]
        options = {"batch_size": self.batch_size, "reach": self.reach, "progress": self._directed}
        return directions_of(self.model, self.windows, layers, **options)

    def measure_directions(self, progress: Callable[[int, int], None] | None) -> None:
        """Measure them now; ``progress`` is called with (done, total) after each batch."""
        self._directed = progress
        self.directions  # noqa: B018  the property is kept

    @cached_property
    def _facts(self) -> Facts:
        return facts_for(self.model, self.windows, self.tokenizer, self.reach)

    @property
    def _everywhere(self) -> int | None:
        return whole_reach(self.model, self.windows, self.reach)

    @cached_property
    def _texts(self) -> list[Batches]:
        """What is read: the text, and some of it that stands twice."""
        twice = _twice(self.windows, (self.reach or positions_of(self.model) or 2 * BACK) // 2)
        tokens = self.batch_size * self.windows.length
        return [list(placed_over(x, max(1, tokens // x.length), self._everywhere)) for x in (self.windows, twice)]

    def _shares_on_text(self, budget: int, report: Callable[[], None]) -> Shares:
        """Measured ones, or even ones where those are better on windows that they were not measured on.

        Each half of the windows is held out once: the shares that the other half gives are tried on it.
        """
        with self.made(budget) as student:
            costs = [self._costs(student, half, report) for half in self._halves]
            plan = plan_of(student)
            even = self._loss(student, self._halves, report) if len(costs) > 1 else None
        itemsize = self.model.dtype.itemsize
        sizes = {name: plan[name].state_bytes(itemsize) // len(own) for name, own in costs[0].items()}

        def split(found: Mapping[str, Tensor]) -> dict[str, list[float]]:
            return shared(sizes, {name: own.tolist() for name, own in found.items()})

        windows = [len(text) for text, _ in self._halves]
        mean = {
            name: sum(n * own[name] for n, own in zip(windows, costs, strict=True)) / sum(windows) for name in sizes
        }
        made_by = {"budget": budget, "tokens": self.windows.tokens, "source": self.windows.source}
        made_by["reach"] = self._everywhere
        layers = split(mean)
        if even is not None:
            measured = sum(
                self._held_out(budget, split(other), half, report)
                for other, half in zip(reversed(costs), self._halves, strict=True)
            )
            made_by["held_out"] = {"measured": measured / len(costs), "even": even / len(costs)}
            if measured > even:
                layers = {name: [1.0] * len(own) for name, own in layers.items()}
                logger.warning(held_out_line(made_by["held_out"]))
        of_all = {name: own.tolist() for name, own in mean.items()}
        return Shares(layers, of_all, describe(self.model)["name"], made_by)

    @cached_property
    def _halves(self) -> list[list[Batches]]:
        """The text and what of it stands twice, in two parts; in one if there is a single batch."""
        parts = 2 if min(map(len, self._texts)) > 1 else 1
        return [[batches[n::parts] for batches in self._texts] for n in range(parts)]

    def _costs(self, student: PreTrainedModel, half: list[Batches], report: Callable[[], None]) -> dict[str, Tensor]:
        text, looked_up = (costs_of_heads(student, batches, report) for batches in half)
        return {name: own + LOOKED_UP * looked_up[name] for name, own in text.items()}

    def _held_out(
        self, budget: int, layers: dict[str, list[float]], half: list[Batches], report: Callable[[], None]
    ) -> float:
        with self.made(budget, Shares(layers)) as student:
            return self._loss(student, [half], report)

    @torch.no_grad()
    def _loss(self, student: PreTrainedModel, halves: list[list[Batches]], report: Callable[[], None]) -> float:
        """KL to the original in nats per token, text that stands twice as weighed in measuring, summed over halves."""
        loss, total = Objective(student, lambda: softmax(student)), 0.0
        with evaluation_mode(student):
            for weight, batches in ((w, b) for half in halves for w, b in zip((1, LOOKED_UP), half, strict=True)):
                tokens, rows = sum(map(loss.count, batches)), sum(len(batch["input_ids"]) for batch in batches)
                for batch in batches:
                    inputs = {name: data.to(student.device) for name, data in batch.items()}
                    total += weight * loss(inputs, tokens, rows).item()
                    report()
        return total


def _twice(windows: TokenWindows, most: int) -> TokenWindows:
    """Some of the windows, as many side by side as :data:`BACK` tokens take, or ``most``, or what there is of a longer
    one; all of that twice."""
    some = windows.take(math.ceil(TWICE * len(windows)))
    back = max(1, min(BACK, most, len(some) * windows.length))
    beside = max(1, back // windows.length)

    def rows(x: Tensor) -> Tensor:
        return x[: len(x) // beside * beside].reshape(-1, beside * windows.length)[:, :back].repeat(1, 2)

    mask = some.attention_mask
    return replace(
        some, input_ids=rows(some.input_ids), attention_mask=None if mask is None else rows(mask), texts=None
    )
