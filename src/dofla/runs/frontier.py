"""The bytes that a model needs: compressed caches of several sizes, on several texts and at several lengths."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, bfloat16
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.compression.calibrate import measure
from dofla.compression.compress import check_fit
from dofla.compression.retrieval import AUTO
from dofla.compression.size import parse_size
from dofla.compression.target import Target, tokenizer_of
from dofla.data import TokenWindows
from dofla.display import Bar, Part, Result, factor, figure, size, table
from dofla.errors import DoflaError, malformed
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.verdict import perplexity
from dofla.integration.checkpoint import write_adapter
from dofla.integration.consistency import check_consistency
from dofla.integration.converted import Converted
from dofla.integration.reading import check_readable
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import describe, original, restore
from dofla.integration.wrapped import takes_model
from dofla.storage.fields import build
from dofla.storage.files import new_folder, read_json, write_json

CACHED = (16, 32, 64, 128, 256)
"""Default sizes: the bytes of a bfloat16 cache of so many tokens."""
FRONTIER, ADAPTERS = "frontier.json", "compressed"
"""In the folder that is written: the figures, and a folder of adapters, each named by its size in bytes."""

_TRIES = 3  # sizes tried at most between one that misses the target and one that meets it, for each length
_STEP = 1.05  # sizes closer to each other than this factor count as one
_UNIT = 1024  # sizes between those given are multiples of so many bytes
_FORMAT = 4


@dataclass(frozen=True)
class Point:
    """A compressed model on a text, at a length.

    Attributes:
        size: bytes asked for.
        bytes: of the compressed cache per sequence, at most ``size``.
        text: its name.
        length: of the windows, in tokens.
        loss_increase: model loss less original loss, nats per token.
        loss_increase_interval: of 95 %, bootstrap over windows; None of fewer than four windows.
        kl: KL(original ‖ model) of the next-token distributions, nats.
    """

    size: int
    bytes: int
    text: str
    length: int
    loss_increase: float
    loss_increase_interval: list[float] | None
    kl: float

    @property
    def loss(self) -> float:
        """The loss to compare with a target, in nats per token: the loss increase, or the KL where that is more. On
        text like the model's own the two have the same mean, and chance, which moves the loss increase of a few windows
        by half of it, hardly moves the KL."""
        return max(self.loss_increase, self.kl)


@dataclass
class Frontier(Result):
    """Quality against bytes.

    Attributes:
        points: one for each size, length and text.
        cache: by length, bytes of the softmax model's key-value cache.
        target: nats per token that may be lost, if given.
        model: class, name and number of parameters.
        made_from: source and tokens of the calibration text, its context, and ``retrieval_heads``, if given.
        evaluated: by name of a text, source of its windows.
    """

    points: list[Point] = field(repr=False)
    cache: dict[int, int] = field(repr=False)
    target: float | None = None
    model: dict[str, Any] = field(default_factory=dict, repr=False)
    made_from: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, str] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        """Sizes that are the smallest within the target at some length; without a target, all."""
        if self.target is None:
            return sorted({x.size for x in self.points})
        return sorted({x.size for length in self.cache if (x := self.smallest(length))})

    @property
    def texts(self) -> list[str]:
        """Their names, in the order in which they were given."""
        return list(dict.fromkeys(x.text for x in self.points))

    def at(self, length: int) -> list[Point]:
        """Points of a length, the smallest size first; of each size the text with the highest loss."""
        worst: dict[int, Point] = {}
        for point in self.points:
            if point.length == length:
                worst[point.size] = max(point, worst.get(point.size, point), key=lambda x: x.loss)
        return [worst[size] for size in sorted(worst)]

    def smallest(self, length: int) -> Point | None:
        """The smallest size that is within the target at ``length`` on all texts, as are all larger ones; or None."""
        found = None
        for point in reversed(self.at(length)):
            if self.target is None or point.loss > self.target:
                break
            found = point
        return found

    def between(self, length: int) -> int | None:
        """The size that should just meet the target, by a power law between the last that misses it and the first that
        does not; None if there are no such two, or none between them that would make a difference."""
        high = self.smallest(length)
        if self.target is None or high is None:
            return None
        low = next((x for x in reversed(self.at(length)) if x.size < high.size), None)
        if low is None:
            return None
        part = math.log(low.loss / self.target) / math.log(low.loss / max(high.loss, self.target / 100))
        size = math.ceil(max(low.size * (high.size / low.size) ** part, _STEP * low.size) / _UNIT) * _UNIT
        return size if _STEP * size <= high.size else None

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
            shown = table("cache", "smaller", *self.texts, "perplexity", gap=2)
            points = {(x.size, x.text): x for x in self.points if x.length == length}
            for worst in self.at(length):
                own = [points.get((worst.size, text)) for text in self.texts]
                cells = [f"{figure(x.loss_increase)}, {figure(x.kl)}" if x else "" for x in own]
                smaller = f"{figure(self.cache[length] / worst.bytes)} x"
                shown.add_row(size(worst.bytes), smaller, *cells, perplexity(worst.loss_increase))
            yield f"{length} tokens, of which the original's cache is {size(self.cache[length])}"
            yield shown
            yield ""
        yield "loss increase and KL, nats per token"
        if self.target is not None:
            yield f"A size is within the target of {self.target:g} if both are, on every text."
        if heads := self.made_from.get("retrieval_heads"):
            yield f"retrieval heads, which grow beside the size: {heads}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": _FORMAT, **asdict(self), "cache": {str(length): n for length, n in self.cache.items()}}

    @classmethod
    def load(cls, folder: str | Path) -> Frontier:
        """Read what :func:`dofla.frontier` wrote; DoflaError naming the file if it is missing or damaged."""
        path = Path(folder) / FRONTIER
        data = read_json(path, "a frontier")
        if data.get("format") != _FORMAT:
            raise DoflaError(f"{path} was made by an older version of dofla: make it again with dofla frontier")
        with malformed(f"{path} holds no frontier", "make it again with dofla frontier"):
            cache = {int(length): n for length, n in data["cache"].items()}
            return build(cls, {**data, "cache": cache}, "it", strict=False)


@takes_model("frontier", Bar.stage)
def frontier(
    model: PreTrainedModel,
    windows: TokenWindows | Tensor | Mapping[str, Tensor],
    texts: Mapping[str, Sequence[TokenWindows]],
    *,
    sizes: Sequence[str | int] | None = None,
    target: float | None = None,
    batch_size: int = 1,
    context: int | None = None,
    retrieval_heads: int | str = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | Path | None = None,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Frontier:
    """Evaluate compressed caches of several sizes at several lengths; with a target, find the smallest that meets it.

    Args:
        model: as for :func:`dofla.compress`; it is compressed in between, and restored.
        windows: text to calibrate on, as for :func:`dofla.calibrate`.
        texts: by name of a text, windows of it that are not used for calibration, some of each length.
        sizes: to try, as for :func:`dofla.compress`; default five, each twice the one before (:data:`CACHED`).
        target: nats per token that loss increase and KL are to stay within, on all texts. Sizes are then tried from the
            smallest up until they do at all lengths, and a few more between the last that misses it and the first that
            does not.
        batch_size: windows per pass.
        context: as for :func:`dofla.compress`; a shorter one needs fewer bytes.
        retrieval_heads, tokenizer: as for :func:`dofla.compress`. By default none: sizes are constant.
        out: new folder for ``frontier.json`` and for ``compressed``: adapters, named by their bytes, of the sizes that
            are the smallest within the target, or without a target of all.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass and each size.

    Raises:
        DoflaError: as :func:`dofla.compress`; no size; no text; a text
            without windows, or with two sets of one length; windows longer than ``context``; a target that is not above
            0; ``out`` exists.
    """
    report = progress if callable(progress) else None
    target_model, sets = Target.of(model, context), _sets(texts)
    for own in sets.values():
        check_readable(model, own.input_ids, own.source)
    if sizes is not None and not len(sizes):
        raise DoflaError("no size to try: give one or more, as 1.5MiB, or leave sizes out")
    if target is not None and not 0 < target < math.inf:
        raise DoflaError(f"target is {target}: give what may be lost, above 0, in nats per token, for instance 0.02")
    if context is not None and (longest := max(length for _, length in sets)) > context:
        raise DoflaError(f"context is {context}, and texts have {longest} tokens: give as many, or leave it out")
    sites = target_model.compressed
    per_token = sum(x.kv_heads * (x.head_dim + x.value_dim) for x in sites) * bfloat16.itemsize
    given = [n * per_token for n in CACHED] if sizes is None else [parse_size(x) for x in sizes]
    order = sorted(set(given))
    ranking = (tokenizer or tokenizer_of(model, needed=False)) if retrieval_heads else None
    check_fit(target_model, order[0], None, "measured", retrieval_heads, has_tokenizer=ranking is not None)
    with new_folder(out) if out is not None else nullcontext() as folder:
        needed = retrieval_heads not in (0, AUTO)
        calibration = measure(model, target_model, windows, "measured", ranking, batch_size, progress, needed)
        wanted = {"context": context, "retrieval_heads": retrieval_heads or None}
        made_from = {**calibration.made_by, **{name: number for name, number in wanted.items() if number is not None}}
        sources = {text: own[0].source for text, own in texts.items()}
        found = Frontier([], {}, target, describe(model), made_from, sources)
        tried = 0
        while (size := _next(found, order)) is not None:
            converted = calibration.compress(model, target_model, size, retrieval_heads)
            try:
                if not tried:
                    check_consistency(model, lambda: original(model))
                found.cache |= {length: converted.plan.softmax_bytes(length, model.dtype) for _, length in sets}
                found.points += _evaluated(converted, size, sets, batch_size)
                if folder is not None:
                    home = folder / ADAPTERS / str(size)
                    home.mkdir(parents=True)
                    write_adapter(model, home)
            finally:
                restore(model)
            tried += 1
            if report is not None:
                report("sizes", tried, max(tried, len(order)))
        if folder is not None:
            for size in {x.size for x in found.points} - set(found.kept):
                shutil.rmtree(folder / ADAPTERS / str(size))
            write_json(folder / FRONTIER, found.to_dict())
    return found


def _sets(texts: Mapping[str, Sequence[TokenWindows]]) -> dict[tuple[str, int], TokenWindows]:
    """Windows by text and length."""
    sets = {(text, windows.length): windows for text, own in texts.items() for windows in own}
    if not texts or not all(texts.values()) or len(sets) < sum(map(len, texts.values())):
        what = ", ".join(f"{text!r} of {[w.length for w in own]} tokens" for text, own in texts.items()) or "none"
        raise DoflaError(f"windows to evaluate on: {what}: give each text one set of windows for each length")
    return sets


def _costs(x: Point) -> str:
    return f"perplexity {perplexity(x.loss_increase)}"


def _evaluated(
    converted: Converted, size: int, sets: Mapping[tuple[str, int], TokenWindows], batch_size: int
) -> Iterator[Point]:
    model = converted.model
    for (text, length), windows in sets.items():
        with evaluation_mode(model):
            figures = next_token_figures(model, windows, batch_size=batch_size)
        increase, interval = figures["loss_increase"], figures["loss_increase_interval"]
        held = converted.plan.cache_bytes(length, model.dtype)
        yield Point(size, held, text, length, increase, interval, figures["kl"])


def _next(found: Frontier, order: Sequence[int]) -> int | None:
    """The size to try after those that were tried; None if there is none."""
    tried = {x.size for x in found.points}
    left = [size for size in order if size not in tried]
    met = bool(tried) and found.target is not None and all(found.smallest(length) for length in found.cache)
    if left and not met:
        return left[0]
    if found.target is None or len(tried - set(order)) >= _TRIES * len(found.cache):
        return None
    return next(filter(None, map(found.between, sorted(found.cache))), None)
