"""Sentence embeddings of an encoder before and after."""

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, batches
from dofla.evaluation.sides import counted, of_both
from dofla.integration.recorder import mean_pooled, run_body


class EmbeddingFigures(TypedDict):
    """The result of :func:`embedding_figures`."""

    cosine: float
    spearman: float


@torch.no_grad()
def embedding_figures(
    model: PreTrainedModel,
    windows: TokenWindows | Images,
    *,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> EmbeddingFigures:
    """Agreement of mean-pooled, normalized embeddings; ``progress`` is called with (done, total) batches.

    Returns:
        ``cosine`` (mean similarity between the original's and the model's embedding of the same input) and
        ``spearman`` (rank correlation, over all pairs of inputs, of the similarities that either model gives them).
    """
    parts = counted(batches(windows, batch_size), progress)
    rows = [of_both(model, _embed, windows.batch(part)) for part in parts]
    original, ours = map(torch.cat, zip(*rows, strict=True))
    upper = torch.triu_indices(len(original), len(original), offset=1)
    similarities = [(e @ e.mT)[upper[0], upper[1]] for e in (original, ours)]
    return {"cosine": (original * ours).sum(dim=-1).mean().item(), "spearman": spearman(*similarities)}


def _embed(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    return mean_pooled(run_body(model, batch)["last_hidden_state"].float(), batch.get("attention_mask"))


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation of two lists [N]; ties, which real similarities do not have, are ranked in order."""
    ranks = torch.stack([v.argsort(stable=True).argsort(stable=True).double() for v in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()
