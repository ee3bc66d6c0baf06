"""Compressed caches of several sizes for one model and one text: what does not depend on the size is measured once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.data.facts import Facts
from dofla.distillation.forgetting import costs_of_heads
from dofla.distillation.objective import Objective
from dofla.distillation.retrieval import check_retrieval_heads, facts_for, needed_tokenizer, with_retrieval_heads
from dofla.errors import DoflaError
from dofla.integration.compressed import budget_of, compressed_plan, feature_bytes, smallest_size
from dofla.integration.consistency import check_consistency
from dofla.integration.directions import Directions, directions_of, give_directions
from dofla.integration.offload import check_in_memory
from dofla.integration.placement import calibration_context, placed_over
from dofla.integration.positions import positions_of
from dofla.integration.reading import windows_for
from dofla.integration.recorder import evaluation_mode
from dofla.integration.student import Student
from dofla.integration.surgery import convert, describe, restore, softmax
from dofla.plans.compressed import TooSmall
from dofla.plans.head_budgets import LEAST, HeadBudgets, divide, held_out_line
from dofla.plans.plan import Plan, check_prefill
from dofla.plans.size import in_bytes

logger = logging.getLogger(__name__)

MAX_CALIBRATION_FRACTION = 0.25
"""Head budgets are measured with a cache of at most this fraction of a window, so that eviction occurs: measured costs
then tell what a head would do with four times as much."""
MIN_CALIBRATION_BUDGET = 16
"""Features per KV head of the smallest cache that they are measured with, however short windows are."""
COPY_FRACTION, COPY_WEIGHT = 1 / 3, 0.05
"""Fraction of the windows that is also read repeated, so that copying is rewarded; weight of the loss on that, beside
the loss on the text."""
COPY_DISTANCE = 1024
"""Tokens between a token and its repetition, if the model has so many positions. Long-range heads are others than
short-range ones: with 256, a head that needle retrieval 4,096 tokens back depends on got half of the bytes it needs."""
_REFERENCE, _ANY = 64, 2**31  # a budget whose tokens are counted, with any number of positions

Batches = list[dict[str, Tensor]]


class Compressor:
    """Compresses a model at any size; measurements that do not depend on the size are made once.

    Head budgets are measured on a small compressed cache in which all KV heads have the same size: the cost of eviction
    in each head (:mod:`dofla.distillation.forgetting`) says which heads need the bytes. Most heads attend to little
    that is far, and a few retrieve (retrieval heads, Wu et al. 2024, arXiv 2404.15574): those get the bytes, and
    ``retrieval_heads`` of them hold all tokens, as in DuoAttention (Xiao et al. 2024, arXiv 2410.10819).

    Args:
        model, windows, keep_softmax, batch_size, context, retrieval_heads, tokenizer, prefill: as for
            :func:`dofla.compress`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: TokenWindows | Tensor | Mapping[str, Tensor],
        *,
        keep_softmax: Collection[str] = (),
        batch_size: int = 1,
        context: int | None = None,
        retrieval_heads: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefill: str = "auto",
    ) -> None:
        check_prefill(prefill)
        self.prefill = prefill
        if not isinstance(text := windows_for(model, windows), TokenWindows):
            raise DoflaError("images leave no tokens in a cache: linearize their model instead")
        self.model, self.windows = model, text
        self.keep_softmax, self.batch_size, self.context = keep_softmax, batch_size, context
        self.retrieval_heads, self.tokenizer = retrieval_heads, tokenizer
        self._directions: dict[str, Directions] | None = None
        self._measured: dict[float, HeadBudgets] = {}  # by the budget they were measured at: one for all large sizes

    def budget(self, size: str | int | None = None, ratio: float | None = None) -> float:
        """A size in features per KV head, as all methods take it; DoflaError as :func:`dofla.compress`."""
        return budget_of(self.model, size, ratio, context=self.context, keep_softmax=self.keep_softmax)

    def bytes(self, budget: float) -> int:
        """The size of a budget."""
        return round(budget * self._unit)

    @cached_property
    def _unit(self) -> int:
        return feature_bytes(self.model, self.keep_softmax)

    def plan(self, budget: float, head_budgets: HeadBudgets | None = None) -> Plan:
        """The plan of a size; DoflaError as :func:`dofla.compress`."""
        plan = compressed_plan(
            self.model, budget, head_budgets=head_budgets, keep_softmax=self.keep_softmax, context=self.context
        )
        return replace(plan, prefill=self.prefill)

    def make(self, budget: float, head_budgets: HeadBudgets | None = None) -> PreTrainedModel:
        """The model, compressed; by default all its KV heads have the same size."""
        convert(self.model, self.plan(budget, head_budgets))
        try:
            give_directions(Student.of(self.model).layers, self.measure_directions())
        except BaseException:
            restore(self.model)
            raise
        return self.model

    @contextmanager
    def made(self, budget: float, head_budgets: HeadBudgets | None = None) -> Iterator[PreTrainedModel]:
        """Within the block the model is compressed (:meth:`make`)."""
        compressed = self.make(budget, head_budgets)
        try:
            yield compressed
        finally:
            restore(self.model)

    def check_head_budgets(self, budget: float) -> None:
        """DoflaError, as :func:`dofla.measure_head_budgets`, if those of ``budget`` cannot be measured."""
        check_in_memory(self.model, "measuring head budgets, which head_budgets='even' leaves out,")
        if any(weight.is_inference() for weight in self.model.parameters()):
            raise DoflaError(
                "the model was made within torch.inference_mode(), and no gradients pass through it: open it outside, "
                "or give head_budgets='even'"
            )
        least = self.measured_at(budget)
        try:
            even = self.plan(budget)  # its errors are those of any head budgets
            self.plan(math.floor(LEAST * least))
        except TooSmall:
            needed = smallest_size(self.model, LEAST, self.keep_softmax)
            raise DoflaError(
                f"size {in_bytes(self.bytes(least))} is too small for measured head budgets, the least of which is "
                f"{LEAST:.2f} of an even split: give {in_bytes(needed)} or more, or head_budgets='even'"
            ) from None
        check_retrieval_heads(even, self.retrieval_heads, self.tokenizer, lambda own: self.plan(budget, own))

    def check_consistency(self, budget: float) -> None:
        """DoflaError if the model compressed to ``budget`` fails with a cache, whatever its head budgets."""
        with self.made(budget) as student:
            check_consistency(student, lambda: softmax(student))

    def measured_at(self, budget: float) -> float:
        """The budget that head budgets of ``budget`` are measured with: no more than
        :data:`MAX_CALIBRATION_FRACTION` of a window."""
        even = compressed_plan(self.model, _REFERENCE, keep_softmax=self.keep_softmax, context=_ANY)
        held = [layer.slots_per_head[0] for layer in even.layers]
        most = math.floor(_REFERENCE * MAX_CALIBRATION_FRACTION * self.windows.length / max(held, default=1))
        return min(budget, max(MIN_CALIBRATION_BUDGET, most))

    @property
    def passes(self) -> int:
        """Number of passes over batches that measuring head budgets takes."""
        times = 3 if len(self._halves) > 1 else 1  # measured head budgets and even ones are tried as well
        return times * sum(map(len, self._texts)) + (len(self._facts.documents) if self.retrieval_heads else 0)

    def head_budgets(self, budget: float, report: Callable[[], None] = lambda: None) -> HeadBudgets:
        """Measured head budgets for ``budget``; ``report`` is called after each pass.

        Raises:
            DoflaError: as :func:`dofla.measure_head_budgets`.
        """
        self.check_head_budgets(budget)
        if (least := self.measured_at(budget)) not in self._measured:
            self._measured[least] = self._measure(least, report)
        head_budgets = self._measured[least]
        if not self.retrieval_heads:
            return head_budgets
        with self.made(budget, head_budgets) as student:
            return with_retrieval_heads(Student.of(student), head_budgets, self.retrieval_heads, self._facts, report)

    def measure_directions(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Directions]:
        """Directions of keys and values that matter to coded tokens, by layer, measured the first time; ``progress`` is
        called with (done, total) after each batch."""
        if self._directions is None:
            layers = [layer.name for layer in self.plan(_REFERENCE).layers if not layer.keep_softmax]
            self._directions = directions_of(
                self.model,
                self.windows,
                layers,
                batch_size=self.batch_size,
                context=self.context,
                progress=progress,
            )
        return self._directions

    @cached_property
    def _facts(self) -> Facts:
        tokenizer = needed_tokenizer(self.tokenizer, self.retrieval_heads)
        return facts_for(self.model, self.windows, tokenizer, self.context)

    @property
    def _context(self) -> int | None:
        return calibration_context(self.model, self.windows, self.context)

    @cached_property
    def _texts(self) -> list[Batches]:
        """Batches of the windows, and of repeated text."""
        repeated = _repeated(self.windows, (self.context or positions_of(self.model) or 2 * COPY_DISTANCE) // 2)
        tokens = self.batch_size * self.windows.length
        return [list(placed_over(x, max(1, tokens // x.length), self._context)) for x in (self.windows, repeated)]

    def _measure(self, budget: float, report: Callable[[], None]) -> HeadBudgets:
        """Measured head budgets, or even ones where those are better on windows that they were not measured on.

        Each half of the windows is held out once: the head budgets that the other half gives are tried on it.
        """
        with self.made(budget) as student:
            handle = Student.of(student)
            costs = [self._costs(handle, half, report) for half in self._halves]
            plan = handle.plan
            even = self._loss(student, self._halves, report) if len(costs) > 1 else None
        itemsize = self.model.dtype.itemsize
        sizes = {name: plan[name].state_bytes(itemsize) // len(own) for name, own in costs[0].items()}

        def split(found: Mapping[str, Tensor]) -> dict[str, list[float]]:
            return divide(sizes, {name: own.tolist() for name, own in found.items()})

        windows = [len(text) for text, _ in self._halves]
        mean = {
            name: torch.stack([n * own[name] for n, own in zip(windows, costs, strict=True)]).sum(0) / sum(windows)
            for name in sizes
        }
        made_by: dict[str, Any] = {"size": self.bytes(budget), "tokens": self.windows.tokens}
        made_by |= {"source": self.windows.source, "context": self._context}
        layers = split(mean)
        if even is not None:
            measured = sum(
                self._held_out(budget, split(other), half, report)
                for other, half in zip(reversed(costs), self._halves, strict=True)
            )
            held_out = made_by["held_out"] = {"measured": measured / len(costs), "even": even / len(costs)}
            if measured > even:
                layers = {name: [1.0] * len(own) for name, own in layers.items()}
                logger.warning(held_out_line(held_out))
        of_all = {name: own.tolist() for name, own in mean.items()}
        return HeadBudgets(layers, of_all, describe(self.model)["name"], made_by)

    @cached_property
    def _halves(self) -> list[list[Batches]]:
        """The text and repeated text, in two parts; in one if there is a single batch."""
        parts = 2 if min(map(len, self._texts)) > 1 else 1
        return [[batches[n::parts] for batches in self._texts] for n in range(parts)]

    def _costs(self, student: Student, half: list[Batches], report: Callable[[], None]) -> dict[str, Tensor]:
        text, copied = (costs_of_heads(student, batches, report) for batches in half)
        return {name: own + COPY_WEIGHT * copied[name] for name, own in text.items()}

    def _held_out(
        self, budget: float, layers: dict[str, list[float]], half: list[Batches], report: Callable[[], None]
    ) -> float:
        with self.made(budget, HeadBudgets(layers)) as student:
            return self._loss(student, [half], report)

    @torch.no_grad()
    def _loss(self, student: PreTrainedModel, halves: list[list[Batches]], report: Callable[[], None]) -> float:
        """KL to the original in nats per token, repeated text weighted as in measuring, summed over halves."""
        loss, total = Objective(student, lambda: softmax(student)), 0.0
        with evaluation_mode(student):
            for weight, batches in ((w, b) for half in halves for w, b in zip((1, COPY_WEIGHT), half, strict=True)):
                tokens, rows = sum(map(loss.count, batches)), sum(len(batch["input_ids"]) for batch in batches)
                for batch in batches:
                    inputs = {name: data.to(student.device) for name, data in batch.items()}
                    total += weight * loss(inputs, tokens, rows).item()
                    report()
        return total


def _repeated(windows: TokenWindows, most: int) -> TokenWindows:
    """Documents of some of the windows: as many side by side as fit into :data:`COPY_DISTANCE` tokens, or ``most``, or
    the start of a longer window; each repeated once."""
    some = windows.take(math.ceil(COPY_FRACTION * len(windows)))
    back = max(1, min(COPY_DISTANCE, most, len(some) * windows.length))
    beside = max(1, back // windows.length)

    def rows(x: Tensor) -> Tensor:
        return x[: len(x) // beside * beside].reshape(-1, beside * windows.length)[:, :back].repeat(1, 2)

    mask = some.attention_mask
    return replace(
        some, input_ids=rows(some.input_ids), attention_mask=None if mask is None else rows(mask), texts=None
    )
