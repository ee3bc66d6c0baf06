"""All figures of a student in one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, as_windows
from dofla.distillation.fidelity import attention_fidelity
from dofla.evaluation.embeddings import embedding_figures
from dofla.evaluation.language import next_token_figures
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import describe, plan_of


def evaluate(
    student: PreTrainedModel,
    tokens: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    batch_size: int = 1,
    fidelity_windows: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare a linearised model with the softmax model it was.

    Args:
        student: a linearised model; it is its own teacher.
        tokens: held-out windows.
        batch_size: windows per forward pass.
        fidelity_windows: how many of the windows the layers are compared on.
        seed: of the bootstrap and of the rows looked at.
        progress: called with (done, total) batches.

    Returns:
        ``language`` (models that generate; see :func:`dofla.evaluation.language.next_token_figures`) or ``embeddings``
        (encoders), ``layers`` (see :func:`dofla.distillation.fidelity.attention_fidelity`), ``state_bytes`` beside
        ``softmax_bytes`` (key-value cache at the windows' length), and what was evaluated.
    """
    windows = as_windows(tokens)
    plan = plan_of(student)
    with evaluation_mode(student):
        figures: dict[str, Any] = {"model": describe(student), "source": windows.source, "windows": len(windows)}
        if isinstance(windows, TokenWindows) and student.can_generate():
            options = {"batch_size": batch_size, "seed": seed, "progress": progress}
            figures["language"] = next_token_figures(student, windows, **options)
        else:
            figures["embeddings"] = embedding_figures(student, windows, batch_size=batch_size)
        some = windows.take(fidelity_windows) if isinstance(windows, TokenWindows) else windows
        figures["layers"] = attention_fidelity(student, some, batch_size=batch_size, seed=seed)
    if isinstance(windows, TokenWindows):
        figures["length"] = windows.length
        figures["softmax_bytes"] = plan.softmax_bytes(windows.length, student.dtype)
    kept = plan.kept_softmax_bytes(windows.length, student.dtype) if isinstance(windows, TokenWindows) else 0
    figures["state_bytes"] = plan.state_bytes(student.dtype) + kept
    figures["strategy"] = plan.made_by.get("strategy")
    return figures
