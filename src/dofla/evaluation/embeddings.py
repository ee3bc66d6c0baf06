"""Sentence embeddings of an encoder before and after."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, batches, counted
from dofla.evaluation.sides import of_both
from dofla.integration.recorder import mean_pooled, run_body


@torch.no_grad()
def embedding_figures(
    model: PreTrainedModel,
    windows: TokenWindows | Images,
    *,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Agreement of mean-pooled, normalized embeddings, as :class:`dofla.Evaluation` describes it; ``progress`` is
    called with (done, total) batches."""
    parts = counted(batches(windows, batch_size), progress)

    def embed(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        return mean_pooled(run_body(model, batch)["last_hidden_state"].float(), batch.get("attention_mask"))

    rows = [of_both(model, embed, windows.batch(part)) for part in parts]
    original, ours = map(torch.cat, zip(*rows, strict=True))
    upper = torch.triu_indices(len(original), len(original), offset=1)
    similarities = [(e @ e.mT)[upper[0], upper[1]] for e in (original, ours)]
    return {"cosine": (original * ours).sum(dim=-1).mean().item(), "spearman": spearman(*similarities)}


def spearman(x: Sequence[float] | Tensor, y: Sequence[float] | Tensor) -> float:
    """Rank correlation of two lists [N]; ties share their mean rank. nan if one list is constant."""
    return torch.corrcoef(torch.stack([_ranks(x), _ranks(y)]))[0, 1].item()


def _ranks(values: Sequence[float] | Tensor) -> Tensor:
    _, places, counts = torch.as_tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[places]
