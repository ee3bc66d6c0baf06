"""Next-token loss of original and converted model on the same text."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import TokenWindows, batches, counted, predicted
from dofla.errors import DoflaError
from dofla.evaluation.sides import of_both
from dofla.integration.offload import device_of
from dofla.integration.recorder import fed

LEAST_WINDOWS = 4
"""Fewer windows than these say nothing about how much other windows would differ: their loss has no interval."""
_POSITIONS_AT_A_TIME = 8
_DRAWS = 2000  # of a bootstrap


@torch.no_grad()
def next_token_figures(
    model: PreTrainedModel,
    windows: TokenWindows,
    *,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Loss of original and converted model, loss increase, divergence and agreement, per token, as
    :class:`dofla.Evaluation` describes them; ``progress`` is called with (done, total) batches. Below
    :data:`LEAST_WINDOWS` there is no interval.

    Raises:
        DoflaError: if the windows hold one token each, or the model's logits are not finite.
    """
    if windows.length < 2:
        raise DoflaError("windows of one token leave nothing to predict: give longer ones")
    rows = []
    for part in counted(batches(windows, batch_size), progress):
        batch = {k: v.to(device_of(model)) for k, v in windows.batch(part).items()}
        inputs = fed(model, batch)
        logits = of_both(model, lambda own, inputs: own(**inputs, use_cache=False).logits, inputs)
        rows.append(_compare(*logits, batch))
    sums = torch.cat(rows).double().cpu()  # [windows, 5]: tokens, original, model, kl, agreement
    tokens = sums[:, 0].sum()
    original_loss, loss, kl, agreement = (sums[:, 1:].sum(dim=0) / tokens).tolist()
    interval = None
    if len(windows) >= LEAST_WINDOWS:
        interval = bootstrap_interval(sums[:, 2] - sums[:, 1], sums[:, 0], seed=seed)
    return {
        "tokens": int(tokens),
        "original_loss": original_loss,
        "loss": loss,
        "loss_increase": loss - original_loss,
        "loss_increase_interval": interval,
        "kl": kl,
        "top1_agreement": agreement,
    }


def _compare(original: Tensor, model: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Sums over the real positions of each window [B, 5]: positions, losses of both, divergence, agreement."""
    targets = batch["input_ids"][:, 1:]
    real = predicted(batch)
    total = torch.zeros(len(targets), 5, device=targets.device)
    # Some positions at a time: they stay in a CPU's cache from one step of the arithmetic to the next.
    for part in torch.arange(targets.shape[1], device=targets.device).split(_POSITIONS_AT_A_TIME):
        ours, theirs = (torch.log_softmax(logits[:, part], dim=-1, dtype=torch.float32) for logits in (model, original))
        if not torch.isfinite(ours).all():
            raise DoflaError("the model's logits hold NaN or infinity: check the model's dtype and its feature maps")
        kl = (theirs.exp() * (theirs - ours)).sum(dim=-1)
        agreement = (theirs.argmax(dim=-1) == ours.argmax(dim=-1)).float()
        losses = [-x.gather(-1, targets[:, part, None])[..., 0] for x in (theirs, ours)]
        columns = torch.stack([torch.ones_like(kl), *losses, kl, agreement], dim=-1)
        total += (columns * real[:, part, None]).sum(dim=1)
    return total


def bootstrap_interval(totals: Tensor, counts: Tensor, *, seed: int = 0) -> list[float]:
    """The 95 % interval of ``Σ totals / Σ counts`` under resampling of the entries [N], which belong together."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(totals), (_DRAWS, len(totals)), generator=generator)
    ratios = totals[chosen].sum(dim=1) / counts[chosen].sum(dim=1)
    return ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
