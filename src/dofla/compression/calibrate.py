"""Measuring what a compressed cache of any size needs to know of a model."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla import __version__
from dofla.compression.calibration import Calibration
from dofla.compression.directions import Directions, measure_directions
from dofla.compression.eviction_error import EvictionErrors, streams
from dofla.compression.head_budgets import divide, with_reading
from dofla.compression.importance import measure_importance
from dofla.compression.known import forget, interrupted, keep, unfinished
from dofla.compression.memory import warn_of_memory, ways_out
from dofla.compression.plan import bytes_for, even_bytes
from dofla.compression.reading_shares import SecondReading, reading_shares
from dofla.compression.retrieval import needles_among, rank_heads
from dofla.compression.target import Target, tokenizer_of
from dofla.data import TokenWindows
from dofla.data.python_text import python_text
from dofla.display import Bar
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError, check_choice, check_numbers
from dofla.integration.offload import device_of
from dofla.integration.placement import calibration_context, placed_over
from dofla.integration.reading import check_readable, windows_for
from dofla.integration.recorder import AttentionCall, evaluation_mode, recording, run_body
from dofla.integration.self_samples import token_windows
from dofla.integration.surgery import as_teacher, restore
from dofla.integration.wrapped import takes_model
from dofla.plans.plan import held_out_line, kept_way
from dofla.storage.tensors import digest

logger = logging.getLogger(__name__)

HEAD_BUDGETS = ("measured", "even")
"""Ways to divide the bytes of a compressed cache among KV heads."""
FRACTION, LEAST_TOKENS = 0.25, 64
"""Measured and even budgets are compared with a cache of so many tokens per KV head, a fraction of a window, so that
eviction occurs. At least so many tokens, however short windows are."""
HELD_OUT, HELD_OUT_TOKENS, READINGS = slice(1, None, 6), 1024, 4
"""The batches that they are compared on, and on which no errors are measured; how many tokens of each at most; and how
often those are read: by the original, and with each of three budgets."""
COPY_DISTANCE, COPY_WEIGHT = 1024, 0.3
"""Tokens of the text that are also read twice in a row, so that heads count that copy from far back; and the weight of
errors there beside those in the text. What the second reading attends to counts as well."""
OWN_TEXTS, PYTHON_TEXTS = 3, 6
"""Texts of so many tokens that are read twice for the importance of tokens: the windows', and Python's."""

Batch = dict[str, Tensor]
Progress = Callable[[str, int, int], None]


@dataclass
class Work:
    """Progress of a calibration, in tokens that the model reads in all stages."""

    report: Progress
    total: int
    done: float = 0.0

    def __call__(self, stage: str, tokens: float) -> None:
        """Report so many tokens more."""
        self.done = min(self.done + tokens, self.total)
        self.report(stage, round(self.done), self.total)


@takes_model("calibrate", Bar.stage)
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

    Measured are the means and directions of keys and values, what predicts the importance of tokens, and, unless
    ``head_budgets`` are even, the error of eviction in each KV head, and how much of a text it attends to on a second
    reading, all by forward passes. Most heads attend to little that is far, and a few retrieve (Wu et al. 2024, arXiv
    2404.15574): those get the bytes.
    Every sixth batch is held out: on it budgets that follow from the others are compared with budgets by eviction alone
    and with even ones, and the best are kept.

    One that is interrupted leaves the model as it was; the next with the same text and options goes on from the last
    stage that was finished.

    Args:
        model: as for :func:`dofla.compress`; it is compressed while measuring, and restored.
        windows: some thousand tokens of any text, best in windows of 2,048 or more: what heads attend to farther back
            than that is not measured.
        head_budgets: ``measured`` or ``even``.
        tokenizer: the model's, default the one beside its weights: with it, retrieval heads are ranked, on needles in
            the windows' text.
        context: as for :func:`dofla.compress`.
        keep_softmax: layers to leave out.
        batch_size: windows per pass.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each layer, in tokens that the model reads in all stages.

    Raises:
        DoflaError: as :func:`dofla.compress`; a model that predicts no tokens.
    """
    target, needed = Target.of(model, context, keep_softmax), tokenizer is not None
    tokenizer = tokenizer or tokenizer_of(model, needed=False)
    return measure(model, target, windows, head_budgets, tokenizer, batch_size, progress, needed)


@ways_out()
def measure(
    model: PreTrainedModel,
    target: Target,
    windows: TokenWindows | Tensor | Mapping[str, Tensor],
    head_budgets: str,
    tokenizer: PreTrainedTokenizerBase | None,
    batch_size: int,
    progress: Progress | bool,
    needed: bool,
) -> Calibration:
    """:func:`calibrate` of a model that has been looked at; whether it is ``needed`` that heads are ranked."""
    report: Progress = progress if callable(progress) else lambda stage, done, total: None
    check_numbers(batch_size=batch_size)
    if not isinstance(text := windows_for(model, windows), TokenWindows):
        raise DoflaError("images leave no tokens in a cache: linearize their model instead")
    check_choice("head_budgets", head_budgets, HEAD_BUDGETS)
    needles = needles_among(text, tokenizer, target.length, needed)
    within, layers = calibration_context(model, text, target.context), [site.name for site in target.compressed]
    batches, measured = list(placed_over(text, batch_size, within)), head_budgets == "measured"
    others = batches[HELD_OUT] if measured else []
    short = [{name: x[:, :HELD_OUT_TOKENS] for name, x in batch.items()} for batch in others]
    twice, texts = _repeated(text, target.length), _texts(model, text, target.length, tokenizer)
    first = sum(map(_tokens, batches)) + measured * _tokens(twice)
    compared, documents = READINGS * sum(map(_tokens, short)), 0 if needles is None else needles.documents.tokens
    again = 2 * sum(map(len, texts))
    work = Work(report, first + compared + again + documents)
    warn_of_memory(model, max(*map(_tokens, batches), _tokens(twice), documents))
    data = (x for batch in batches for x in batch.values())
    key = digest(data, __version__, target.name, target.weights, model.dtype, layers, head_budgets)
    folder = unfinished(target.fingerprint) / key

    if (made := interrupted(folder)) is None:
        found, costs, reading = _read(model, layers, batches, work, twice if measured else None)
        made_by = {"source": text.source, "tokens": text.tokens, "context": within}
        of = target.name, target.fingerprint, target.weights
        made = Calibration(found, {}, costs, reading, {}, (), (), *of, made_by)
        keep(made, folder)
    work.done = first
    if measured and not made.shares:
        made = _compared(made, model, target, short, work)
        keep(made, folder)
    work.done = first + compared
    if not made.importance:
        made = replace(made, importance=measure_importance(model, layers, texts, partial(work, "importance")))
        keep(made, folder)
    work.done = first + compared + again
    if needles is not None:
        ranked = partial(work, "retrieval heads", documents / len(needles.documents) / len(layers))
        heads = rank_heads(model, layers, needles, ranked)
        made = replace(made, retrieval=[*heads], attention=[*heads.values()])
    forget(folder)
    return made


def _read(
    model: PreTrainedModel, layers: Sequence[str], batches: Sequence[Batch], work: Work, twice: Batch | None
) -> tuple[dict[str, Directions], dict[str, list[float]], dict[str, list[float]]]:
    """Directions; costs of eviction by the batches that are not held out and by text that stands there ``twice``; and
    what its second reading attends to. Neither of these without that text."""
    errors, copied, held_out = EvictionErrors(), EvictionErrors(), range(len(batches))[HELD_OUT]
    reading = SecondReading()

    def look(call: AttentionCall, number: int) -> None:
        if twice is not None and number not in held_out:
            errors(call)
        work("directions", _tokens(batches[number]) / len(layers))

    with streams(model, layers) as around:
        directions = measure_directions(model, batches, layers, look)
    if twice is None:
        return directions, {}, {}

    def look_twice(call: AttentionCall) -> None:
        copied(call)
        reading(call)

    with recording(model, layers, look_twice), torch.no_grad():
        run_body(model, twice)
    work("copies", _tokens(twice))
    rows = sum(len(batch["input_ids"]) for n, batch in enumerate(batches) if n not in held_out)
    for name in layers:
        errors.errors[name] += COPY_WEIGHT * rows * copied.errors[name]
    costs = {x: errors.cost(x, directions[x].weighing(model), around[x]) for x in layers}
    return directions, costs, reading_shares(reading.attention)


def _repeated(windows: TokenWindows, positions: int | None) -> Batch:
    """The first tokens of the text, twice in a row."""
    return {"input_ids": _parts(windows, positions)[0].repeat(1, 2)}


def _texts(
    model: PreTrainedModel, windows: TokenWindows, positions: int | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Tensor]:
    """Texts that are read twice: the beginning of the windows', and with a tokenizer some that Python comes with, since
    text that repeats itself does not tell what is important in other text."""
    texts = [*_parts(windows, positions)[:OWN_TEXTS]]
    if tokenizer is not None and (documents := python_text()):
        length = len(texts[0])
        more = token_windows(documents, tokenizer, length=length, windows=PYTHON_TEXTS, split="all").input_ids
        with suppress(DoflaError):  # the tokenizer is another model's
            check_readable(model, more, "the text")
            texts += [*more]
    return texts


def _parts(windows: TokenWindows, positions: int | None) -> Tensor:
    """The text in pieces of one length, of which one has room twice [n, L]."""
    ids, mask = windows.input_ids, windows.attention_mask
    ids = ids.flatten() if mask is None else ids[mask.bool()]
    length = min(COPY_DISTANCE, (positions or 2 * COPY_DISTANCE) // 2, len(ids))
    return ids[: len(ids) // length * length].view(-1, length)


def _tokens(batch: Batch) -> int:
    return batch["input_ids"].numel()


def _compared(
    found: Calibration, model: PreTrainedModel, target: Target, others: Sequence[Batch], work: Work
) -> Calibration:
    """The calibration with head budgets by its costs and by what a second reading attends to, by the costs alone, or
    with even ones: those that are best on other batches."""
    sites, length = target.compressed, others[0]["input_ids"].shape[1] if others else 0
    tokens = max(LEAST_TOKENS, math.floor(FRACTION * length))
    size = sum(x.kv_heads * bytes_for(tokens, x.head_dim, x.value_dim) for x in sites)
    sizes = even_bytes(sites, size)
    shares = divide(sizes, found.costs)
    ways = {
        "even": {name: [1.0] * len(own) for name, own in shares.items()},
        "eviction": shares,
        "reading": with_reading(sizes, shares, found.reading),
    }
    made_by, best = dict(found.made_by), [*ways][-1]
    if others:
        made_by["held_out"] = kl = _losses(found, ways, model, target, size, others, work)
        best = kept_way(kl)
        if best == "even":
            logger.warning(held_out_line(kl))
    return replace(found, shares=ways[best], made_by=made_by)


def _losses(
    found: Calibration,
    ways: Mapping[str, Mapping[str, Sequence[float]]],
    model: PreTrainedModel,
    target: Target,
    size: int,
    others: Sequence[Batch],
    work: Work,
) -> dict[str, float]:
    """KL to the original in nats per token, with each of these shares."""
    objective, kl = Objective(model, lambda: as_teacher(model)), dict[str, float]()
    tokens, rows = sum(map(objective.count, others)), sum(len(batch["input_ids"]) for batch in others)
    others = [{name: data.to(device_of(model)) for name, data in batch.items()} for batch in others]
    with evaluation_mode(model):  # hidden states are kept; logits, which are large, are read again for each
        theirs = [objective.read_teacher(batch) if objective.head_apart else None for batch in others]
    work("head budgets", sum(map(_tokens, others)))
    for way, shares in ways.items():
        replace(found, shares=shares).compress(model, target, size)
        kl[way] = 0.0
        try:
            with evaluation_mode(model), torch.no_grad():
                for batch, own in zip(others, theirs, strict=True):
                    kl[way] += objective(batch, tokens, rows, own).item()
                    work("head budgets", _tokens(batch))
        finally:
            restore(model)
    return kl
