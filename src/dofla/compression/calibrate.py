"""Measuring what a compressed cache of any size needs to know of a model."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.compression.calibration import Calibration
from dofla.compression.directions import measure_directions
from dofla.compression.eviction_cost import eviction_costs
from dofla.compression.head_budgets import HeadBudgets, divide
from dofla.compression.plan import bytes_for, compressed_plan, even_bytes
from dofla.compression.retrieval import needles_among, rank_heads
from dofla.compression.target import Target
from dofla.data import TokenWindows
from dofla.display import Bar, reports_progress
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError, check_numbers
from dofla.integration.consistency import check_consistency
from dofla.integration.converted import Converted
from dofla.integration.offload import check_in_memory
from dofla.integration.placement import calibration_context, placed_over
from dofla.integration.reading import windows_for
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import convert, original, restore
from dofla.integration.wrapped import unwraps_its_model
from dofla.plans.plan import held_out_line
from dofla.storage.defaults import with_torchs_defaults

logger = logging.getLogger(__name__)

HEAD_BUDGETS = ("measured", "even")
"""Ways to divide the bytes of a compressed cache among KV heads."""
FRACTION, LEAST_TOKENS = 0.25, 64
"""Costs are measured with a cache of so many tokens per KV head, a fraction of a window, so that eviction occurs: they
then tell what a head would do with four times as much. At least so many tokens, however short windows are."""
COPY_FRACTION, COPY_WEIGHT = 1 / 3, 0.05
"""Fraction of the windows that is also read repeated, so that copying is rewarded; weight of the loss on that, beside
the loss on the text."""
COPY_DISTANCE = 1024
"""Tokens between a token and its repetition, if the model has so many positions. Long-range heads are others than
short-range ones: with 256, a head that needle retrieval 4,096 tokens back depends on got half of the bytes it needs."""

Batches = list[dict[str, Tensor]]
Progress = Callable[[str, int, int], None]


@unwraps_its_model
@with_torchs_defaults
@reports_progress("calibrate", Bar.stage)
def calibrate(
    model: PreTrainedModel,
    windows: TokenWindows | Tensor | Mapping[str, Tensor],
    *,
    head_budgets: str = "measured",
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: int | None = None,
    keep_softmax: Collection[str] | None = (),
    batch_size: int = 1,
    progress: Progress | bool = True,
) -> Calibration:
    """Measure what :func:`dofla.compress` needs to know of a model, whatever the size of its cache.

    Measured are the means and directions of keys and values, and, unless ``head_budgets`` are even, what eviction costs
    in each KV head. Most heads attend to little that is far, and a few retrieve (Wu et al. 2024, arXiv 2404.15574):
    those get the bytes. Each half of the windows is held out once: budgets measured on the other half are compared on
    it with even ones. Where even budgets are better, even budgets are kept.

    Args:
        model: as for :func:`dofla.compress`; it is compressed while measuring, and restored.
        windows: a dozen calibration windows of any text.
        head_budgets: ``measured``; or ``even``, which takes no gradients and a tenth of the time.
        tokenizer: the model's: with it, retrieval heads are ranked, on needles in the windows' text.
        context: as for :func:`dofla.compress`.
        keep_softmax: layers to leave out.
        batch_size: windows per pass, forward and backward; repeated text is read in as many tokens per pass, but at
            least one document of up to 2,048.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass.

    Raises:
        DoflaError: as :func:`dofla.compress`; a model that predicts no tokens, or was made in inference mode.
    """
    return measure(
        model,
        Target.of(model, context, keep_softmax),
        windows,
        head_budgets=head_budgets,
        tokenizer=tokenizer,
        batch_size=batch_size,
        progress=progress,
    )


def measure(
    model: PreTrainedModel,
    target: Target,
    windows: TokenWindows | Tensor | Mapping[str, Tensor],
    *,
    head_budgets: str,
    tokenizer: PreTrainedTokenizerBase | None,
    batch_size: int,
    progress: Progress | bool,
) -> Calibration:
    """:func:`calibrate` of a model that has been looked at."""
    report = progress if callable(progress) else None
    check_numbers(batch_size=batch_size)
    if not isinstance(text := windows_for(model, windows), TokenWindows):
        raise DoflaError("images leave no tokens in a cache: linearize their model instead")
    if head_budgets not in HEAD_BUDGETS:
        raise DoflaError(f"head_budgets is {head_budgets!r}: choose one of {', '.join(HEAD_BUDGETS)}")
    measured = head_budgets == "measured"
    if takes_gradients := measured or tokenizer is not None:
        check_in_memory(model, "measuring gradients, which head_budgets='even' does without,")
        if any(weight.is_inference() for weight in model.parameters()):
            raise DoflaError(
                "the model was made within torch.inference_mode(), and no gradients pass through it: open it outside, "
                "or give head_budgets='even'"
            )
    within, layers = calibration_context(model, text, target.context), [site.name for site in target.compressed]
    bar = report and partial(report, "directions")
    directions = measure_directions(model, text, layers, batch_size=batch_size, context=within, progress=bar)
    found = Calibration(
        directions,
        model=target.name,
        fingerprint=target.fingerprint,
        made_by={"source": text.source, "tokens": text.tokens, "context": within},
    )
    if not takes_gradients:
        return found
    costs = _Costs(model, target, found, text, batch_size, report)
    if measured:
        found = costs.measured()
    return found if tokenizer is None else costs.ranked(found, tokenizer)


class _Costs:
    """The measuring of eviction costs, by the directions of a calibration; ``report`` is called with (stage, done,
    total)."""

    def __init__(
        self,
        model: PreTrainedModel,
        target: Target,
        calibration: Calibration,
        windows: TokenWindows,
        batch_size: int,
        report: Progress | None,
    ) -> None:
        self.model, self.target, self.calibration, self.windows = model, target, calibration, windows
        self.report, within = report, calibration.made_by["context"]
        repeated = _repeated(windows, (target.length or 2 * COPY_DISTANCE) // 2)
        tokens = batch_size * windows.length
        texts = [list(placed_over(x, max(1, tokens // x.length), within)) for x in (windows, repeated)]
        parts = 2 if min(map(len, texts)) > 1 else 1
        self.halves = [[batches[n::parts] for batches in texts] for n in range(parts)]

    def measured(self) -> Calibration:
        """The calibration with measured head budgets, or with even ones where those are better on windows that they
        were not measured on."""
        tokens = max(LEAST_TOKENS, math.floor(FRACTION * self.windows.length))
        batches = sum(len(texts) for half in self.halves for texts in half)
        done, passes = count(1), (3 if len(self.halves) > 1 else 1) * batches

        def report() -> None:
            if self.report:
                self.report("head budgets", next(done), passes)

        with self.compressed(tokens) as compressed:
            check_consistency(compressed.model, lambda: original(compressed.model))
            costs = [self._costs(compressed, half, report) for half in self.halves]
            even = self._loss(compressed, self.halves, report) if len(costs) > 1 else None
        sizes = even_bytes(self.target.compressed, self.size(tokens))
        windows = [len(text) for text, _ in self.halves]
        mean = {
            name: torch.stack([n * own[name] for n, own in zip(windows, costs, strict=True)]).sum(0) / sum(windows)
            for name in sizes
        }
        of_all = {name: own.tolist() for name, own in mean.items()}
        made_by, shares = dict(self.calibration.made_by), divide(sizes, of_all)
        if even is not None:
            others = [divide(sizes, {name: x.tolist() for name, x in own.items()}) for own in reversed(costs)]
            measured = 0.0
            for other, half in zip(others, self.halves, strict=True):
                with self.compressed(tokens, other) as compressed:
                    measured += self._loss(compressed, [half], report)
            made_by["held_out"] = {"measured": measured / len(costs), "even": even / len(costs)}
            if measured > even:
                shares = {name: [1.0] * len(own) for name, own in shares.items()}
                logger.warning(held_out_line(made_by["held_out"]))
        return replace(self.calibration, shares=shares, costs=of_all, made_by=made_by)

    def ranked(self, found: Calibration, tokenizer: PreTrainedTokenizerBase) -> Calibration:
        """``found`` with its retrieval heads."""
        needles = needles_among(self.windows, tokenizer, self.target.length)
        done, passes = count(1), len(needles.documents)
        shares = found.shares or {name: [1.0] * own.shape[0] for name, own in found.directions.items()}
        costs = found.costs or {name: [0.0] * len(own) for name, own in shares.items()}
        with self.compressed(max(LEAST_TOKENS, math.floor(FRACTION * needles.documents.length)), shares) as compressed:
            report = self.report
            each = (lambda: report("retrieval heads", next(done), passes)) if report else (lambda: None)
            return replace(found, retrieval=rank_heads(compressed, shares, costs, needles, each))

    def size(self, tokens: int) -> int:
        """Bytes of a cache of so many tokens per KV head."""
        return sum(x.kv_heads * bytes_for(tokens, x.head_dim, x.value_dim) for x in self.target.compressed)

    @contextmanager
    def compressed(self, tokens: int, shares: Mapping[str, Sequence[float]] | None = None) -> Iterator[Converted]:
        """Within the block the model is compressed to so many tokens per KV head, in the mean."""
        budgets = None if shares is None else HeadBudgets(shares)
        plan = compressed_plan(self.target, self.size(tokens), head_budgets=budgets)
        handle = Converted.of(convert(self.model, plan, sites=self.target.sites))
        try:
            self.calibration.apply(handle.layers)
            yield handle
        finally:
            restore(self.model)

    def _costs(self, compressed: Converted, half: list[Batches], report: Callable[[], None]) -> dict[str, Tensor]:
        text, copied = (eviction_costs(compressed, batches, report) for batches in half)
        return {name: own + COPY_WEIGHT * copied[name] for name, own in text.items()}

    @torch.no_grad()
    def _loss(self, compressed: Converted, halves: list[list[Batches]], report: Callable[[], None]) -> float:
        """KL to the original in nats per token, repeated text weighted as in measuring, summed over halves."""
        model = compressed.model
        loss, total = Objective(model, lambda: original(model)), 0.0
        with evaluation_mode(model):
            for weight, batches in ((w, b) for half in halves for w, b in zip((1, COPY_WEIGHT), half, strict=True)):
                tokens, rows = sum(map(loss.count, batches)), sum(len(batch["input_ids"]) for batch in batches)
                for batch in batches:
                    inputs = {name: data.to(model.device) for name, data in batch.items()}
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
