"""All figures of a student in one result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, batches
from dofla.display import Part, Result, reports_progress, rounded, size, table
from dofla.distillation.fidelity import LayerFidelity, attention_fidelity
from dofla.evaluation.embeddings import embedding_figures
from dofla.evaluation.language import next_token_figures
from dofla.integration.reading import windows_for
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import describe, plan_of
from dofla.integration.wrapped import unwraps_its_model
from dofla.storage.defaults import with_torchs_defaults

_LANGUAGE = (
    "tokens",
    "teacher_loss",
    "student_loss",
    "loss_increase",
    "loss_increase_interval",
    "kl",
    "top1_agreement",
)
_EMBEDDINGS = ("cosine", "spearman")


@dataclass(frozen=True)
class Evaluation(Result):
    """What linearising cost. Of models that generate, ``cosine`` and ``spearman`` are None; of encoders, the seven from
    ``tokens`` to ``top1_agreement``; of images, ``length`` and ``softmax_bytes``.

    Attributes:
        model: class, name and number of parameters.
        source: of the windows.
        windows: how many.
        layers: by name; see :class:`dofla.distillation.fidelity.LayerFidelity`.
        state_bytes: per sequence; of layers kept softmax, their cache at the windows' length.
        strategy: of the plan.
        length: of the windows, in tokens.
        softmax_bytes: of a key-value cache at the windows' length.
        tokens: predicted.
        teacher_loss, student_loss: next-token loss, nats per token.
        loss_increase: the student's loss less the teacher's, nats per token.
        loss_increase_interval: of 95 %, bootstrap over windows.
        kl: KL(teacher ‖ student) of the next-token distributions, nats.
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
    teacher_loss: float | None = None
    student_loss: float | None = None
    loss_increase: float | None = None
    loss_increase_interval: list[float] | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    cosine: float | None = None
    spearman: float | None = None

    @property
    def perplexity_increase(self) -> float | None:
        """Fraction by which perplexity grows: ``exp(loss_increase) - 1``."""
        return None if self.loss_increase is None else math.expm1(self.loss_increase)

    def parts(self) -> Iterator[Part]:
        """The figures of the whole, then those of each layer."""
        whole = table("", "", show_header=False)
        for name in (*_LANGUAGE, *_EMBEDDINGS):
            value = getattr(self, name)
            if value is not None:
                shown = f"{value[0]:.4f} to {value[1]:.4f}" if isinstance(value, list) else f"{value:.6g}"
                whole.add_row(name.replace("_", " "), shown)
        whole.add_row("state", size(self.state_bytes))
        if self.softmax_bytes is not None:
            whole.add_row(f"softmax cache at {self.length} tokens", size(self.softmax_bytes))
        yield whole
        yield ""
        layers = table("layer", "attention KL", "output error")
        for name, layer in self.layers.items():
            layers.add_row(name, rounded(layer.kl, 4), rounded(layer.output_error, 4))
        yield layers

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the seven figures from ``tokens`` on are under ``language``, the last two under
        ``embeddings``; what is not known of such a model is left out."""
        data: dict[str, Any] = {"model": self.model, "source": self.source, "windows": self.windows}
        section, names = ("language", _LANGUAGE) if self.loss_increase is not None else ("embeddings", _EMBEDDINGS)
        data[section] = {name: getattr(self, name) for name in names}
        data["layers"] = {name: asdict(layer) for name, layer in self.layers.items()}
        if self.length is not None:
            data |= {"length": self.length, "softmax_bytes": self.softmax_bytes}
        return data | {"state_bytes": self.state_bytes, "strategy": self.strategy}


@unwraps_its_model
@with_torchs_defaults
@reports_progress("evaluate")
def evaluate(
    student: PreTrainedModel,
    tokens: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    batch_size: int = 1,
    fidelity_windows: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | bool = True,
) -> Evaluation:
    """Compare a linearised model with the softmax model it was.

    Args:
        student: a linearised model; it is its own teacher.
        tokens: held-out windows.
        batch_size: windows per forward pass.
        fidelity_windows: how many of the windows the layers are compared on.
        seed: of the bootstrap and of the rows looked at.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (done, total) batches.

    Returns:
        Figures that are fields (``result.loss_increase``); ``print`` shows them as tables, ``to_dict()`` is for JSON.

    Raises:
        DoflaError: not linearised; windows of one token; logits that are not finite.
    """
    windows = windows_for(student, tokens)
    plan = plan_of(student)
    of_text = isinstance(windows, TokenWindows)
    some = windows.take(fidelity_windows) if of_text else windows
    first, then = (len(batches(x, batch_size)) for x in (windows, some))

    def after(before: int) -> Callable[[int, int], None] | None:
        return (lambda done, _: progress(before + done, first + then)) if progress else None

    with evaluation_mode(student):
        options = {"batch_size": batch_size, "progress": after(0)}
        if of_text and student.can_generate():
            figures = next_token_figures(student, windows, seed=seed, **options)
        else:
            figures = embedding_figures(student, windows, **options)
        layers = attention_fidelity(student, some, batch_size=batch_size, seed=seed, progress=after(first))
    return Evaluation(
        model=describe(student),
        source=windows.source,
        windows=len(windows),
        layers=layers,
        state_bytes=plan.state_bytes(student.dtype)
        + (plan.kept_softmax_bytes(windows.length, student.dtype) if of_text else 0),
        strategy=plan.made_by.get("strategy"),
        length=windows.length if of_text else None,
        softmax_bytes=plan.softmax_bytes(windows.length, student.dtype) if of_text else None,
        **figures,
    )
