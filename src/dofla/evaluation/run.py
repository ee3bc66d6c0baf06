"""All figures of a converted model in one result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, batches
from dofla.display import Part, Result, as_text, factor, figure, size, table
from dofla.distillation.fidelity import LayerFidelity, attention_fidelity
from dofla.evaluation.embeddings import embedding_figures
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.verdict import embedding_words, perplexity, verdict
from dofla.integration.converted import Converted
from dofla.integration.reading import windows_for
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import describe
from dofla.integration.wrapped import takes_model

_SECTIONS = {
    "language": ("tokens", "original_loss", "loss", "loss_increase", "loss_increase_interval", "kl", "top1_agreement"),
    "embeddings": ("cosine", "spearman"),
}
_ENDLESS = 1e4  # nats: the divergence of attention that does not see some token at all is astronomical as computed


@dataclass(frozen=True)
class Evaluation(Result):
    """The cost of linearizing a model. For models that generate, ``cosine`` and ``spearman`` are None; for encoders,
    the seven from ``tokens`` to ``top1_agreement``; for images, ``length`` and ``softmax_bytes``.

    Attributes:
        model: class, name and number of parameters.
        source: of the windows.
        windows: how many.
        layers: by name; see :class:`dofla.distillation.fidelity.LayerFidelity`.
        state_bytes: per sequence, at the windows' length.
        strategy: of the plan.
        length: of the windows, in tokens.
        softmax_bytes: of a key-value cache at the windows' length.
        tokens: predicted.
        original_loss, loss: next-token loss, nats per token.
        loss_increase: the model's loss less the original's, nats per token.
        loss_increase_interval: of 95 %, bootstrap over windows; None of fewer than four windows.
        kl: KL(original ‖ model) of the next-token distributions, nats.
        top1_agreement: share of positions where both find the same token likeliest.
        cosine: mean similarity between both models' embeddings of the same input.
        spearman: rank correlation, over pairs of inputs, of the similarities that either model gives them.
    """

    model: dict[str, Any] = field(repr=False)
    source: str
    windows: int
    layers: dict[str, LayerFidelity] = field(repr=False)
    state_bytes: int
    strategy: str | None = None
    length: int | None = None
    softmax_bytes: int | None = None
    tokens: int | None = None
    original_loss: float | None = None
    loss: float | None = None
    loss_increase: float | None = None
    loss_increase_interval: list[float] | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    cosine: float | None = None
    spearman: float | None = None

    def parts(self, layers: bool = False) -> Iterator[Part]:
        """The figures to decide by, and a sentence about them; with ``layers``, a row per layer as well."""
        length = "" if self.length is None else f" of {self.length} tokens"
        yield f"{self.windows} windows{length}: {self.source}\n"
        data = self.to_dict()
        if "language" in data:
            yield from self._language(data["language"], data["length"], data["softmax_bytes"])
        else:
            yield from self._embeddings(data["embeddings"])
        if layers:
            yield ""
            yield self._layers()

    def table(self, layers: bool = False) -> str:
        """The result as text; with ``layers``, a row per layer as well: the error of its attention output relative to
        the original's, and the KL of its attention, where that is finite."""
        return as_text(self.parts(layers))

    def _language(self, figures: dict[str, Any], length: int, before: int) -> Iterator[Part]:
        both, after = table("", "original", "compressed", ""), self.state_bytes
        losses = figures["original_loss"], figures["loss"]
        increase, interval = figures["loss_increase"], figures["loss_increase_interval"]
        both.add_row("loss, nats per token", *map(figure, losses))
        both.add_row("perplexity", *(figure(math.exp(loss)) if loss < 20 else "over 10^8" for loss in losses))
        both.add_row(f"cache at {length} tokens", size(before), size(after), factor(before, after))
        yield both
        yield ""
        shown = table("", "", show_header=False)
        shown.columns[1].justify = "left"
        within = "" if interval is None else f" (95 % interval {' to '.join(map(figure, interval))})"
        shown.add_row("loss increase, nats per token", f"{figure(increase)}{within}")
        within = "" if interval is None else f" ({' to '.join(map(perplexity, interval))})"
        shown.add_row("perplexity increase", f"{perplexity(increase)}{within}")
        shown.add_row("KL divergence, nats per token", figure(figures["kl"]))
        shown.add_row("same likeliest token", f"{100 * figures['top1_agreement']:.1f} %")
        yield shown
        yield f"\n{verdict(increase, interval, factor(before, after), length)}"

    def _embeddings(self, figures: dict[str, float]) -> Iterator[Part]:
        shown = table("", "", show_header=False)
        shown.add_row("cosine of embeddings", figure(figures["cosine"]))
        shown.add_row("rank correlation of similarities", figure(figures["spearman"]))
        yield shown
        yield f"\n{embedding_words(min(figures['cosine'], figures['spearman']))}"

    def _layers(self) -> Part:
        # Attention that no longer sees some token diverges without end: the column would say nothing.
        divergences = [layer.kl for layer in self.layers.values() if layer.kl is not None and layer.kl < _ENDLESS]
        finite = len(divergences) == len(self.layers)
        shown = table("layer", "output error", *(["attention KL"] if finite else []))
        for n, (name, layer) in enumerate(self.layers.items()):
            shown.add_row(name, figure(layer.output_error), *([figure(divergences[n])] if finite else []))
        return shown

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the seven figures from ``tokens`` on are under ``language``, the last two under
        ``embeddings``; what is not known of such a model is left out."""
        data: dict[str, Any] = {"model": self.model, "source": self.source, "windows": self.windows}
        section = "embeddings" if self.loss_increase is None else "language"
        data[section] = {name: getattr(self, name) for name in _SECTIONS[section]}
        data["layers"] = {name: asdict(layer) for name, layer in self.layers.items()}
        if self.length is not None:
            data |= {"length": self.length, "softmax_bytes": self.softmax_bytes}
        return data | {"state_bytes": self.state_bytes, "strategy": self.strategy}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        """The reverse of :meth:`to_dict`; entries of other names are passed over."""
        known = {spec.name for spec in fields(cls)}
        whole = {**data, **data.get("language", {}), **data.get("embeddings", {})}
        layers = {name: LayerFidelity(**layer) for name, layer in data["layers"].items()}
        return cls(**{name: value for name, value in whole.items() if name in known} | {"layers": layers})


@takes_model("evaluate")
def evaluate(
    model: PreTrainedModel,
    windows: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    batch_size: int = 1,
    fidelity_windows: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | bool = True,
) -> Evaluation:
    """Compare a converted model with the softmax model it was. The figures stand on its model card when it is saved.

    They are fields of the result (``result.loss_increase``). ``print`` shows what to decide by,
    ``result.table(layers=True)`` adds a row per layer, ``to_dict()`` is for JSON.

    Args:
        model: a converted model; it is its own original.
        windows: that neither calibration nor training saw.
        batch_size: windows per forward pass.
        fidelity_windows: how many of the windows the layers are compared on.
        seed: of the bootstrap and of the rows looked at.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (done, total) batches.

    Raises:
        DoflaError: not converted; windows of one token; logits that are not finite.
    """
    windows = windows_for(model, windows)
    handle = Converted.of(model)
    plan = handle.plan
    text = windows if isinstance(windows, TokenWindows) else None
    some = windows.take(fidelity_windows)
    first, then = (len(batches(x, batch_size)) for x in (windows, some))

    def after(before: int) -> Callable[[int, int], None] | None:
        return (lambda done, _: progress(before + done, first + then)) if callable(progress) else None

    with evaluation_mode(model):
        if text is not None and model.can_generate():
            figures = next_token_figures(model, text, batch_size=batch_size, seed=seed, progress=after(0))
        else:
            figures = embedding_figures(model, windows, batch_size=batch_size, progress=after(0))
        layers = attention_fidelity(handle, some, batch_size=batch_size, seed=seed, progress=after(first))
    result = Evaluation(
        model=describe(model),
        source=windows.source,
        windows=len(windows),
        layers=layers,
        state_bytes=plan.cache_bytes(0 if text is None else text.length, model.dtype),
        strategy=plan.made_by.get("strategy"),
        length=None if text is None else text.length,
        softmax_bytes=None if text is None else plan.softmax_bytes(text.length, model.dtype),
        **figures,
    )
    handle.record.add_figures(result.to_dict())
    return result
